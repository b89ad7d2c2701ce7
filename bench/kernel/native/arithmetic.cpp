// How much arithmetic this machine does: THREADS threads multiply and add in registers, as fast as they can.
//
//   arithmetic THREADS
//
// prints the names of what this processor has, "fma" and "dpbf16" (a dot product of two pairs of bf16, summed in fp32).
// Then, for each line of input, one of these names, it prints GFLOP/s of one pass: 2 per lane of an fma, 4 of a dot
// product. It ends with its input.

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// As many as hide the latency of four cycles at two a cycle, with some to spare.
constexpr int kChains = 12;
constexpr int64_t kSteps = 1 << 20;

volatile float sink;  // or the compiler would leave the work out

#if defined(__AVX512F__)
typedef __m512 Wide;
inline Wide fma_one(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
inline Wide all(float value) { return _mm512_set1_ps(value); }
#else
typedef __m256 Wide;
inline Wide fma_one(Wide a, Wide b, Wide c) { return _mm256_fmadd_ps(a, b, c); }
inline Wide all(float value) { return _mm256_set1_ps(value); }
#endif
constexpr double kLanes = sizeof(Wide) / sizeof(float);

// Sums have names, not indices: compilers keep arrays in memory. The asm forbids to fold a step into the next.
template <typename Step>
__attribute__((always_inline)) inline void chains(Step step) {
  Wide a = all(0), b = all(1), c = all(2), d = all(3), e = all(4), f = all(5), g = all(6), h = all(7);
  Wide i = all(8), j = all(9), k = all(10), l = all(11);
  for (int64_t n = 0; n < kSteps; ++n) {
    a = step(a), b = step(b), c = step(c), d = step(d), e = step(e), f = step(f);
    g = step(g), h = step(h), i = step(i), j = step(j), k = step(k), l = step(l);
    __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f));
    __asm__("" : "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l));
  }
  const Wide total = a + b + c + d + e + f + g + h + i + j + k + l;
  sink = total[0];
}

void fma_pass() {
  const Wide a = all(0.999f), b = all(1e-3f);
  chains([=](Wide sum) { return fma_one(sum, a, b); });
}

#if defined(__AVX512BF16__)
void dot_pass() {
  const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80)), b = a;  // ones
  chains([=](Wide sum) { return _mm512_dpbf16_ps(sum, a, b); });
}
#endif

double rate(void (*pass)(), double operations_a_lane, int threads) {
  const auto started = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(pass);
  pass();
  for (std::thread& other : others) other.join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
  return operations_a_lane * kLanes * kChains * kSteps * threads / elapsed.count() / 1e9;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: arithmetic THREADS\n");
    return 2;
  }
  const int threads = std::max(1, std::atoi(arguments[1]));
#if defined(__AVX512BF16__)
  std::printf("fma dpbf16\n");
#else
  std::printf("fma\n");
#endif
  std::fflush(stdout);
  char line[64];
  while (std::fgets(line, sizeof line, stdin) != nullptr) {
    line[std::strcspn(line, "\n")] = '\0';
    double found = 0;
    if (std::strcmp(line, "fma") == 0) found = rate(fma_pass, 2, threads);
#if defined(__AVX512BF16__)
    if (std::strcmp(line, "dpbf16") == 0) found = rate(dot_pass, 4, threads);
#endif
    std::printf("%.3f\n", found);
    std::fflush(stdout);
  }
  return 0;
}
