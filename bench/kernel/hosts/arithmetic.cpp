// How much arithmetic in bf16 this processor does: THREADS threads multiply and add in registers, as fast as they can.
//
//   arithmetic THREADS
//
// For each line of input it prints GFLOP/s of one pass of dot products of two pairs of bf16, summed in fp32: 4 a lane; 0
// where the processor has none. It ends with its input.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512BF16__)
// As many as hide the latency of four cycles at two a cycle, with some to spare.
constexpr int kChains = 12;
constexpr int64_t kSteps = 1 << 20;
constexpr double kLanes = 16;

volatile float sink;  // or the compiler would leave the work out

// Sums have names, not indices: compilers keep arrays in memory. The asm forbids to fold a step into the next.
void pass() {
  const __m512bh ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
  const auto all = [](float value) { return _mm512_set1_ps(value); };
  const auto step = [=](__m512 sum) { return _mm512_dpbf16_ps(sum, ones, ones); };
  __m512 a = all(0), b = all(1), c = all(2), d = all(3), e = all(4), f = all(5), g = all(6), h = all(7);
  __m512 i = all(8), j = all(9), k = all(10), l = all(11);
  for (int64_t n = 0; n < kSteps; ++n) {
    a = step(a), b = step(b), c = step(c), d = step(d), e = step(e), f = step(f);
    g = step(g), h = step(h), i = step(i), j = step(j), k = step(k), l = step(l);
    __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f));
    __asm__("" : "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l));
  }
  const __m512 total = a + b + c + d + e + f + g + h + i + j + k + l;
  sink = total[0];
}

double rate(int threads) {
  const auto started = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(pass);
  pass();
  for (std::thread& other : others) other.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
  return 4 * kLanes * kChains * kSteps * threads / elapsed.count() / 1e9;
}
#else
double rate(int) { return 0; }
#endif

}  // namespace

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::max(1, std::atoi(arguments[1])) : 1;
  char line[64];
  while (std::fgets(line, sizeof line, stdin) != nullptr) {
    std::printf("%.3f\n", rate(threads));
    std::fflush(stdout);
  }
  return 0;
}
