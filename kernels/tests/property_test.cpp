// The kernel against float64 in random cases, on every path that the processor supports.
//
//   property_test [--cases 10000] [--seed 1] [--only INDEX]
//
// Exit status 1 when anything failed, with a line for each failure that says how to run that case alone.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>

#include "gemm/parallel.h"
#include "reference.h"

namespace bf16kit {
namespace {

uint64_t g_seed = 1;
int64_t g_failures = 0;

void fail(const std::string& where, const std::string& what) {
  ++g_failures;
  std::printf("FAIL --seed %llu %s: %s\n", static_cast<unsigned long long>(g_seed), where.c_str(), what.c_str());
}

std::vector<const Path*> supported_paths(Arithmetic arithmetic) {
  std::vector<const Path*> paths;
#if defined(__x86_64__)
  for (const Path* path : {&kAvx512Bf16, &kAvx512, &kAvx2}) {
    if (path->supported() && path->compute(arithmetic) != nullptr) paths.push_back(path);
  }
#endif
  paths.push_back(&kPortable);
  return paths;
}

// Paths with fused multiply-add give the same bits.
bool fused([[maybe_unused]] const Path& path) {
#ifdef FP_FAST_FMAF
  return true;
#else
  return &path != &kPortable;
#endif
}

// --- ways to compute the same rows ----------------------------------------------------------------------------------

uint64_t next_id() {
  static uint64_t id = uint64_t{1} << 40;  // far from those that multiply() gives
  return ++id;
}

// Rows [first, first + rows) alone, as a product of their own, in whole blocks.
Exact<float> compute(const Case& c, const Path& path, int64_t first, int64_t rows) {
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

// All rows, cut into parts at random, which are computed in any order.
Exact<float> compute_in_parts(const Case& c, const Path& path, Random& random) {
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

// `threads` threads, each of which takes the next part that is left.
void run_on_threads(void* threads, void (*part)(void*, size_t), size_t parts, void* context) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < parts; i = next++) part(context, i);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < *static_cast<int64_t*>(threads); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

// As ONNX Runtime calls it, for up to three products of the same x; here of the same weight as well.
std::vector<Exact<float>> compute_on_threads(const Case& c, const Path& path, int64_t threads, size_t count) {
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

std::string at(int64_t index, int64_t n) {
  return " at row " + std::to_string(index / n) + ", column " + std::to_string(index % n);
}

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

void check_close(const Exact<float>& y, const Expected& expected, int64_t n, const std::string& where) {
  for (int64_t i = 0; i < y.size(); ++i) {
    if (close(y[i], expected.y[i], expected.tolerance[i])) continue;
    const std::string wanted = number(expected.tolerance[i]) + " of " + number(expected.y[i]);
    return fail(where, number(y[i]) + at(i, n) + " is not within " + wanted);
  }
}

// `part` holds rows of `whole`, from row `first` on.
void check_same(const Exact<float>& whole, const Exact<float>& part, int64_t first, int64_t n, const std::string& where,
                const std::string& what) {
  for (int64_t i = 0; i < part.size(); ++i) {
    const int64_t index = first * n + i;
    if (same(whole[index], part[i])) continue;
    return fail(where, number(part[i]) + " " + what + ", but " + number(whole[index]) + " otherwise," + at(index, n));
  }
}

// That tile.inl's order of summation is kept, in a few elements.
void check_order(const Case& c, const Exact<float>& y, Random& random, const std::string& where) {
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

// The portable path takes longer than all the others together, and may rest now and then.
void check(const Case& c, Random& random, const std::string& name, double portable_rests = 0) {
  const Expected expected = expect(c);
  Exact<float> first;  // of the fused paths
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
    if (first.size() != 0) check_same(first, whole, 0, c.n, where, "on this path");
    first = std::move(whole);
  }
}

// Sums of K equal terms, whose roundings all go the same way.
void check_constants(Layout layout, Activation activation, Arithmetic arithmetic) {
  Case c;
  c.rows = 3, c.k = 16384, c.n = 33;
  c.layout = layout, c.activation = activation, c.arithmetic = arithmetic;
  c.x = Exact<float>(c.rows * c.k, 1);
  std::fill(c.x.data(), c.x.data() + c.x.size(), 0.1f);
  c.w.assign(c.k * c.n, narrow(0.1f));
  store_weight(c, 1);
  Random random(g_seed, 0);
  check(c, random, "constants");
}

// Sums of zero, so that the bias alone reaches the activation: floats of all magnitudes, and those that are special.
void check_activation(Activation activation, Arithmetic arithmetic, Random& random) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> special = {0, -0.0f, infinity, -infinity, std::nanf(""), -std::nanf(""), 1e-45f, -1e-45f,
                                      1e-38f, -1e-38f, 3e38f, -3e38f, -13.1f, -14.5f, -87, -88, -104, -110, -200};
  Case c;
  c.rows = 1, c.k = 1, c.n = 100003;
  c.activation = activation, c.arithmetic = arithmetic;
  c.x = Exact<float>(1, 0);
  c.x[0] = 0;
  c.w.assign(c.n, 0);
  c.bias = Exact<float>(c.n, 1);
  for (int64_t j = 0; j < c.n; ++j) {
    const double usual = random.between(0, 1 << 24) * 0x1p-20, any = std::exp2(random.between(-149, 127));
    c.bias[j] = static_cast<float>((random.chance(0.9) ? usual : any) * (random.chance(0.5) ? 1 : -1));
  }
  std::copy(special.begin(), special.end(), c.bias.data());
  store_weight(c, 0);
  check(c, random, "activation");
}

void check_choice(Arithmetic arithmetic) {
  const std::vector<const Path*> paths = supported_paths(arithmetic);
  unsetenv("BF16KIT_KERNEL_PATH");
  if (choose_path(arithmetic) != paths[0]) fail("choose_path", "not the fastest path without BF16KIT_KERNEL_PATH");
  for (const Path* path : paths) {
    setenv("BF16KIT_KERNEL_PATH", path->name, 1);
    if (choose_path(arithmetic) != path) fail("choose_path", std::string("not the path asked for, ") + path->name);
  }
#if defined(__x86_64__)
  setenv("BF16KIT_KERNEL_PATH", kAvx512Bf16.name, 1);
  const Path* wanted = !kAvx512Bf16.supported() ? nullptr : arithmetic == Arithmetic::kBf16 ? &kAvx512Bf16 : &kAvx512;
  if (choose_path(arithmetic) != wanted) fail("choose_path", "not the path that goes with avx512_bf16");
#endif
  setenv("BF16KIT_KERNEL_PATH", "avx", 1);
  if (choose_path(arithmetic) != nullptr) fail("choose_path", "a path that does not exist");
}

// A sum that is less than nothing by so little that it rounds to zero: 0 + -0 = 0, on every path.
void check_signed_zero(Arithmetic arithmetic) {
  Case c;
  c.rows = 1, c.k = 1, c.n = 64;
  c.arithmetic = arithmetic;
  c.x = Exact<float>(1, 0);
  c.x[0] = 1e-30f;
  c.w.assign(c.n, narrow(-1e-30f));
  store_weight(c, 0);
  for (const Path* path : supported_paths(arithmetic)) {
    const Exact<float> y = compute(c, *path, 0, 1);
    if (std::signbit(y[0])) fail(std::string("signed zero, path=") + path->name, "-0 where the order of sums gives 0");
  }
}

#if defined(__x86_64__)
// What another library has left in a thread's control register changes no bits, and is there again afterwards.
void check_rounding_mode(Random& random) {
  for (const unsigned left : {0x9fc0u, 0x1fc0u, 0x7f80u, 0x1f80u}) {  // both flushed; operands; toward zero; default
    Case c = draw(random);
    for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = random.normal() * (i % 2 == 0 ? 1e-37f : 1e-39f);
    for (const Path* path : supported_paths(c.arithmetic)) {
      const std::string where = std::string("MXCSR, path=") + path->name + " " + c.describe();
      const Exact<float> usual = compute(c, *path, 0, c.rows);
      const unsigned before = _mm_getcsr();
      _mm_setcsr(left);
      const Exact<float> y = compute(c, *path, 0, c.rows);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(before);
      check_same(usual, y, 0, c.n, where, "with another mode in the thread");
      if (after != left) fail(where, "the thread's mode is not what it was");
    }
  }
}
#endif

// Parts of one product that begin at the same row and have not as many: what is kept of x is not taken for the other's.
void check_kept_rows(Random& random) {
  Case c;
  c.rows = 9, c.k = 1024, c.n = 32;
  c.x = Exact<float>(c.rows * c.k, 0);
  for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = random.normal();
  c.w.assign(c.k * c.n, narrow(0.5f));
  store_weight(c, 0);
  for (c.arithmetic = Arithmetic::kFp32;; c.arithmetic = Arithmetic::kBf16) {
    for (const Path* path : supported_paths(c.arithmetic)) {
      const Exact<float> usual = compute(c, *path, 0, c.rows);
      Exact<float> y(c.rows * c.n, 0);
      Product product = c.product(y.data());
      product.id = next_id();
      path->compute(c.arithmetic)(product, {0, 3, 0, 1});
      path->compute(c.arithmetic)(product, {0, c.rows, 0, 1});
      check_same(usual, y, 0, c.n, std::string("kept rows, path=") + path->name, "after a part of fewer rows");
    }
    if (c.arithmetic == Arithmetic::kBf16) break;
  }
}

void check_particulars() {
  Random random(g_seed, 0);
  for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
    check_choice(arithmetic);
    check_signed_zero(arithmetic);
    check_constants(Layout::kPanels, Activation::kNone, arithmetic);
    check_constants(Layout::kTransposed, Activation::kRelu, arithmetic);
    for (Activation activation : kActivations) check_activation(activation, arithmetic, random);
  }
  check_kept_rows(random);
#if defined(__x86_64__)
  for (int i = 0; i < 20; ++i) check_rounding_mode(random);
#endif
}

int run(int64_t cases, int64_t only) {
  std::string names;
  for (const Path* path : supported_paths(Arithmetic::kBf16)) names += std::string(" ") + path->name;
  if (only < 0) check_particulars();
  constexpr int64_t kEnough = 20;
  for (int64_t i = only < 0 ? 1 : only; i <= (only < 0 ? cases : only) && g_failures < kEnough; ++i) {
    Random random(g_seed, i);
    const Case c = draw(random);
    check(c, random, "--only " + std::to_string(i), 0.7);
  }
  std::printf("%s: %lld cases, seed %llu, paths%s\n", g_failures == 0 ? "ok" : "FAILED",
              static_cast<long long>(only < 0 ? cases : 1), static_cast<unsigned long long>(g_seed), names.c_str());
  return g_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) {
  int64_t cases = 10000, only = -1;
  for (int i = 1; i < count; i += 2) {
    const std::string name = arguments[i];
    char* end = nullptr;
    const long long value = i + 1 < count ? std::strtoll(arguments[i + 1], &end, 10) : 0;
    if (end == nullptr || *end != '\0' || value < 0 || (name != "--cases" && name != "--seed" && name != "--only")) {
      std::fprintf(stderr, "usage: %s [--cases 10000] [--seed 1] [--only INDEX]\n", arguments[0]);
      return 2;
    }
    (name == "--cases" ? cases : name == "--only" ? only : reinterpret_cast<int64_t&>(bf16kit::g_seed)) = value;
  }
  return bf16kit::run(cases, only);
}
