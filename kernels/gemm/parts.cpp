#include "gemm/parts.h"

#include <algorithm>
#include <atomic>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace bf16kit {
namespace {

// The least work of a call, in nanoseconds: handing out a shorter one takes a thread about as long as the work. Neighbouring
// parts are joined to such calls, such as many rows of a narrow product, or many short heads.
constexpr double kLeastCall = 8000;
constexpr size_t kMostRanges = 64;

// Calls, in ranges of neighbouring ones: a range for each core. A thread takes the calls of a range that no other has begun. If
// there is none left, it helps with the others. So it copies rows once, and finds in its own caches what it computed for them in
// the node before.
struct Calls {
  void (*part)(void* context, size_t i);
  void* context;
  size_t parts, each;  // all parts, and those of a call
  size_t count, ranges;
  uint64_t id;
  std::atomic<size_t> begun{0};  // ranges
  std::atomic<size_t> taken[kMostRanges] = {};

  // Returns a call that nobody has taken, of range `own` if possible. There is one: this is called `count` times.
  size_t take(size_t& own) {
    size_t call = 0;
    for (; own < ranges; own = begun++) {
      if (take_from(own, call)) return call;
    }
    for (size_t range = 0; !take_from(range, call); range = (range + 1) % ranges) {}
    return call;
  }

  bool take_from(size_t range, size_t& call) {
    const size_t first = count * range / ranges, size = count * (range + 1) / ranges - first;
    size_t at = taken[range];
    while (at < size && !taken[range].compare_exchange_weak(at, at + 1)) {}
    call = first + at;
    return at < size;
  }

  static void run(void* calls, size_t) {
    struct Place {
      uint64_t id;
      size_t range;
    };
    static thread_local Place place = {};
    auto& all = *static_cast<Calls*>(calls);
    if (place.id != all.id) place = {all.id, all.begun++};
    const size_t first = all.take(place.range) * all.each, end = std::min(first + all.each, all.parts);
    const Place kept = place;  // a part may call do_parts
    for (size_t i = first; i < end; ++i) all.part(all.context, i);
    place = kept;
  }
};

}  // namespace

unsigned available_cores() {
  static const unsigned cores = [] {
#ifdef __linux__
    cpu_set_t allowed;  // of up to 1,024 processors; with more, the call fails
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return static_cast<unsigned>(CPU_COUNT(&allowed));
#endif
    return std::thread::hardware_concurrency();
  }();
  return cores;
}

void do_parts(double whole, RunParts run, void* threads, void (*part)(void* context, size_t i), size_t parts, void* context) {
  if (parts < 2 || whole < kAlone) {
    for (size_t i = 0; i < parts; ++i) part(context, i);
    return;
  }
  static std::atomic<uint64_t> ids{0};
  const auto each = static_cast<size_t>(kLeastCall * static_cast<double>(parts) / whole) + 1;
  const size_t count = (parts + each - 1) / each, cores = std::max(available_cores(), 1u);
  Calls calls = {part, context, parts, each, count, std::min({count, cores, kMostRanges}), ++ids};
  run(threads, Calls::run, count, &calls);
}

}  // namespace bf16kit
