// Work that is divided into parts for the threads of a session.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bf16kit {

// Runs part(context, i) for every i in [0, parts), in any order, on any threads, and returns when all are done.
using RunParts = void (*)(void* threads, void (*part)(void* context, size_t i), size_t parts, void* context);

// Total work in nanoseconds below which one thread is done before another one has woken up.
constexpr double kAlone = 32000;

inline int64_t divide_up(int64_t total, int64_t each) { return (total + each - 1) / each; }

// The least work of a call, in nanoseconds: handing out a shorter one takes a thread about as long as the work.
constexpr double kLeastCall = 8000;

struct JoinedParts {
  void (*part)(void* context, size_t i);
  size_t parts, each;
  void* context;

  static void run(void* joined, size_t i) {
    const auto& all = *static_cast<const JoinedParts*>(joined);
    const size_t end = all.parts - i * all.each < all.each ? all.parts : (i + 1) * all.each;
    for (size_t k = i * all.each; k < end; ++k) all.part(all.context, k);
  }
};

// Runs all parts, which take one core `whole` nanoseconds together: with `run(threads, …)`, or in this thread if it is not
// worth waking another one. Neighbouring parts are joined to calls of at least kLeastCall, such as many rows of a narrow product,
// or many short heads.
inline void do_parts(double whole, RunParts run, void* threads, void (*part)(void* context, size_t i), size_t parts,
                     void* context) {
  if (parts > 1 && whole >= kAlone) {
    JoinedParts joined = {part, parts, static_cast<size_t>(kLeastCall * static_cast<double>(parts) / whole) + 1, context};
    return run(threads, JoinedParts::run, (parts + joined.each - 1) / joined.each, &joined);
  }
  for (size_t i = 0; i < parts; ++i) part(context, i);
}

}  // namespace bf16kit
