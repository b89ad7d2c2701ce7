// How fast this machine reads memory: THREADS threads sum a mapped file that no cache holds.
//
//   bandwidth FILE BYTES THREADS
//
// writes FILE, maps it as ONNX Runtime maps weights, finds out how many streams a thread reads fastest and how far
// ahead it prefetches best, and prints both. Then, for each line of input, a number of passes, it prints the bandwidth of the
// fastest and of the median pass in GB/s. It ends with its input.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// As wide as the compiler's target allows; the compiler splits it where registers are narrower.
typedef uint64_t Wide __attribute__((vector_size(64)));

constexpr size_t kLine = 64;
constexpr size_t kAhead[] = {0, 512, 1024, 2048, 4096};

// Sums `bytes` from `start` on, as kStreams consecutive streams read side by side.
template <int kStreams>
__attribute__((noinline)) uint64_t sum(const char* start, size_t bytes, size_t ahead) {
  Wide sums[kStreams] = {};
  const size_t stream = bytes / kStreams / kLine * kLine;
  for (size_t at = 0; at < stream; at += kLine) {
    for (int i = 0; i < kStreams; ++i) {
      const char* line = start + i * stream + at;
      if (ahead != 0) __builtin_prefetch(line + ahead);
      Wide values;
      std::memcpy(&values, line, sizeof values);
      sums[i] += values;
    }
  }
  uint64_t total = 0;
  for (const Wide& one : sums) {
    for (size_t lane = 0; lane < kLine / sizeof(uint64_t); ++lane) total += one[lane];
  }
  return total;
}

using Sum = uint64_t (*)(const char*, size_t, size_t);
struct Streams {
  int count;
  Sum sum;
};
constexpr Streams kStreams[] = {{1, sum<1>}, {2, sum<2>}, {4, sum<4>}, {8, sum<8>}};

volatile uint64_t sink;  // or the compiler would leave the sums out

double pass(Sum sum, size_t ahead, const char* start, size_t bytes, int threads) {
  const size_t share = bytes / threads / kLine * kLine;
  const auto started = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([=] { sink = sum(start + i * share, share, ahead); });
  }
  sink = sum(start, share, ahead);
  for (std::thread& other : others) other.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
  return share * threads / elapsed.count() / 1e9;
}

std::vector<double> passes(int count, Sum sum, size_t ahead, const char* start, size_t bytes, int threads) {
  std::vector<double> found;
  for (int i = 0; i < count; ++i) found.push_back(pass(sum, ahead, start, bytes, threads));
  std::sort(found.begin(), found.end());
  return found;
}

const char* map(const char* path, size_t bytes) {
  const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  const std::vector<char> block(1 << 20, 1);
  for (size_t written = 0; file >= 0 && written < bytes; written += block.size()) {
    if (write(file, block.data(), block.size()) != static_cast<ssize_t>(block.size())) return nullptr;
  }
  void* mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
  return mapped == MAP_FAILED ? nullptr : static_cast<const char*>(mapped);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "usage: bandwidth FILE BYTES THREADS\n");
    return 2;
  }
  const size_t bytes = std::strtoull(arguments[2], nullptr, 10) >> 20 << 20;
  const int threads = std::max(1, std::atoi(arguments[3]));
  const char* start = map(arguments[1], bytes);
  if (start == nullptr) {
    std::perror(arguments[1]);
    return 1;
  }
  Streams best = kStreams[0];
  size_t ahead = 0;
  double fastest = 0;
  for (const Streams& streams : kStreams) {
    for (const size_t distance : kAhead) {
      const double found = passes(5, streams.sum, distance, start, bytes, threads)[2];
      if (found > fastest) {
        fastest = found;
        best = streams;
        ahead = distance;
      }
    }
  }
  std::printf("%d %zu\n", best.count, ahead);
  std::fflush(stdout);
  char line[64];
  while (std::fgets(line, sizeof line, stdin) != nullptr) {
    const auto found = passes(std::max(1, std::atoi(line)), best.sum, ahead, start, bytes, threads);
    std::printf("%.3f %.3f\n", found.back(), found[found.size() / 2]);
    std::fflush(stdout);
  }
  return 0;
}
