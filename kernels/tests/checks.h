// Different ways to compute the rows of a case, on every path that the processor supports, and the properties that must hold for
// all of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>

#include "gemm/parallel.h"
#include "reference.h"

namespace bf16kit {

inline uint64_t g_seed = 1;
inline int64_t g_failures = 0;

// Of the bits that the fastest path of each processor gave in the random cases: equal on all, whatever other paths they have.
inline uint64_t g_digest = 0;

inline void digest(const Exact<float>& y) {
  for (int64_t i = 0; i < y.size(); ++i) {
    uint32_t bits = 0x7fc00000;
    if (!std::isnan(y[i])) std::memcpy(&bits, &y[i], sizeof bits);
    g_digest = (g_digest ^ bits) * 0x100000001b3;  // FNV-1a, of 32 bits at a time
  }
}

inline void fail(const std::string& where, const std::string& what) {
  ++g_failures;
  std::printf("FAIL --seed %llu %s: %s\n", static_cast<unsigned long long>(g_seed), where.c_str(), what.c_str());
}

inline std::vector<const Path*> supported_paths(Arithmetic arithmetic) {
  std::vector<const Path*> paths;
#if defined(__x86_64__)
  for (const Path* path : {&kAvx512Bf16, &kAvx512, &kAvx2}) {
#else
  for (const Path* path : {&kNeonBf16, &kNeon}) {
#endif
    if (path->supported() && path->compute(arithmetic) != nullptr) paths.push_back(path);
  }
  paths.push_back(&kPortable);
  return paths;
}

// Returns whether the path has fused multiply-add: all such paths give the same bits.
inline bool fused([[maybe_unused]] const Path& path) {
#ifdef FP_FAST_FMAF
  return true;
#else
  return &path != &kPortable;
#endif
}

// --- ways to compute the same rows ----------------------------------------------------------------------------------

inline uint64_t next_id() {
  static uint64_t id = uint64_t{1} << 40;  // far from the ids of multiply()
  return ++id;
}

// Computes rows [first, first + rows) as a separate product, in whole blocks.
inline Exact<float> compute(const Case& c, const Path& path, int64_t first, int64_t rows) {
  Exact<float> y(rows * c.n, 1);
  Product product = c.product(y.data());
  product.x += first * c.k;
  product.rows = rows;
  product.id = next_id();
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    path.compute(product.arithmetic)(product, {row, std::min(kRowBlock, rows - row), 0, product.weight.panels()});
  }
  return y;
}

// Computes all rows in random parts and in random order.
inline Exact<float> compute_in_parts(const Case& c, const Path& path, Random& random) {
  Exact<float> y(c.rows * c.n, 2);
  Product product = c.product(y.data());
  product.id = next_id();
  std::vector<Part> parts;
  for (int64_t row = 0, rows; row < c.rows; row += rows) {
    rows = random.between(1, std::min(kRowBlock, c.rows - row));
    for (int64_t panel = 0, panels; panel < product.weight.panels(); panel += panels) {
      panels = random.between(1, product.weight.panels() - panel);
      parts.push_back({row, rows, panel, panels});
    }
  }
  for (size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[random.between(0, i - 1)]);
  for (const Part& part : parts) path.compute(product.arithmetic)(product, part);
  return y;
}

// Runs the parts on `threads` threads. Each takes the next remaining part.
inline void run_on_threads(void* threads, void (*part)(void*, size_t), size_t parts, void* context) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < parts; i = next++) part(context, i);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < *static_cast<int64_t*>(threads); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

// Computes the product as ONNX Runtime does, up to three times with the same x; here the weight is the same as well.
inline std::vector<Exact<float>> compute_on_threads(const Case& c, const Path& path, int64_t threads, size_t count) {
  std::vector<Exact<float>> results;
  Product products[kMostProducts] = {};
  for (size_t i = 0; i < count; ++i) {
    results.emplace_back(c.rows * c.n, 0);
    products[i] = c.product(results[i].data());
  }
  multiply(products, count, path, run_on_threads, &threads);
  return results;
}

// --- properties -----------------------------------------------------------------------------------------------------

inline std::string at(int64_t index, int64_t n) {
  return " at row " + std::to_string(index / n) + ", column " + std::to_string(index % n);
}

inline std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

inline void check_close(const Exact<float>& y, const Expected& expected, int64_t n, const std::string& where) {
  for (int64_t i = 0; i < y.size(); ++i) {
    if (close(y[i], expected.y[i], expected.tolerance[i])) continue;
    const std::string wanted = number(expected.tolerance[i]) + " of " + number(expected.y[i]);
    return fail(where, number(y[i]) + at(i, n) + " is not within " + wanted);
  }
}

// Checks that `part` equals the rows of `whole` from row `first` on.
inline void check_same(const Exact<float>& whole, const Exact<float>& part, int64_t first, int64_t n,
                       const std::string& where, const std::string& what) {
  for (int64_t i = 0; i < part.size(); ++i) {
    const int64_t index = first * n + i;
    if (same(whole[index], part[i])) continue;
    return fail(where, number(part[i]) + " " + what + ", but " + number(whole[index]) + " otherwise," + at(index, n));
  }
}

// Checks the order of summation that tile.inl states, in a few elements.
inline void check_order(const Case& c, const Exact<float>& y, Random& random, const std::string& where) {
  if (c.activation != Activation::kNone) return;
  for (int i = 0; i < 4; ++i) {
    const int64_t index = random.between(0, y.size() - 1), column = index % c.n;
    float wanted = sum_in_order(c, index / c.n, column);
    const RoundingMode mode(c.arithmetic);
    volatile float sum = wanted;
    if (c.bias.size() != 0) sum = sum + c.bias[column];
    wanted = sum;
    if (same(y[index], wanted)) continue;
    fail(where, number(y[index]) + " is not " + number(wanted) + ", the sum in order," + at(index, c.n));
  }
}

// Checks all properties of a case. `portable_rests` is the probability that the portable path is skipped: it takes longer than
// all others together.
inline void check(const Case& c, Random& random, const std::string& name, double portable_rests = 0) {
  const Expected expected = expect(c);
  Exact<float> first;  // the result of the first path with fused multiply-add
  const std::vector<const Path*> paths = supported_paths(c.arithmetic);
  for (const Path* path : paths) {
    if (path == &kPortable && paths.size() > 1 && random.chance(portable_rests)) continue;
    const std::string where = name + " path=" + path->name + " " + c.describe();
    Exact<float> whole = compute(c, *path, 0, c.rows);
    check_close(whole, expected, c.n, where);
    check_same(whole, compute_in_parts(c, *path, random), 0, c.n, where, "in other parts");
    const size_t count = random.chance(0.3) ? random.between(2, kMostProducts) : 1;
    for (const Exact<float>& y : compute_on_threads(c, *path, random.chance(0.1) ? 3 : 1, count)) {
      check_same(whole, y, 0, c.n, where, "through multiply()");
    }
    const int64_t rows = random.between(1, c.rows), begin = random.between(0, c.rows - rows);
    check_same(whole, compute(c, *path, begin, rows), begin, c.n, where, "in a batch of " + std::to_string(rows));
    for (int64_t row = 0; row < c.rows; row += c.rows <= 8 ? 1 : random.between(1, c.rows / 4)) {
      check_same(whole, compute(c, *path, row, 1), row, c.n, where, "alone");
    }
    if (!fused(*path)) continue;
    check_order(c, whole, random, where);
    first.size() == 0 ? digest(whole) : check_same(first, whole, 0, c.n, where, "on this path");
    first = std::move(whole);
  }
}

// Checks cases 1 to `cases`, or the case `only`, until enough have failed. Prints a summary: `what` was checked, and `add` at the
// end. Returns the exit status.
template <typename Check>
int run_cases(int64_t cases, int64_t only, const char* what, const std::string& add, Check check_case) {
  constexpr int64_t kEnough = 20;
  g_digest = 0;  // not of fixed cases, which draw more on a processor with more paths
  for (int64_t i = only < 0 ? 1 : only; i <= (only < 0 ? cases : only) && g_failures < kEnough; ++i) check_case(i);
  std::printf("%s: %lld cases%s, seed %llu, digest %016llx%s\n", g_failures == 0 ? "ok" : "FAILED",
              static_cast<long long>(only < 0 ? cases : 1), what, static_cast<unsigned long long>(g_seed),
              static_cast<unsigned long long>(g_digest), add.c_str());
  return g_failures == 0 ? 0 : 1;
}

// The common main() of the tests. `run` gets the number of cases, or the index of the only one, and returns the exit status.
inline int run_as_told(int count, char** arguments, int (*run)(int64_t cases, int64_t only)) {
  int64_t cases = 10000, only = -1;
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    char* end = nullptr;
    const long long value = i + 1 < count ? std::strtoll(arguments[i + 1], &end, 10) : 0;
    if (end == nullptr || *end != '\0' || value < 0 || (name != "--cases" && name != "--seed" && name != "--only")) {
      std::fprintf(stderr, "usage: %s [--cases 10000] [--seed 1] [--only INDEX]\n", arguments[0]);
      return 2;
    }
    (name == "--cases" ? cases : name == "--only" ? only : reinterpret_cast<int64_t&>(g_seed)) = value;
  }
  return run(cases, only);
}

}  // namespace bf16kit
