// Fixed cases, not drawn at random: the choice of a path, special sums and operands, the buffers that a thread keeps.
#pragma once

#include "checks.h"

namespace bf16kit {

// Sums of K equal terms, whose rounding errors all have the same sign.
inline void check_constants(Layout layout, Activation activation, Arithmetic arithmetic) {
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

// Sums of zero, so that the activation gets the bias alone: floats of all magnitudes, and special values.
inline void check_activation(Activation activation, Arithmetic arithmetic, Random& random) {
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

inline void check_choice(Arithmetic arithmetic) {
  const std::vector<const Path*> paths = supported_paths(arithmetic);
  unsetenv("BF16KIT_KERNEL_PATH");
#if defined(__x86_64__)
  const bool slow = paths[0] == &kAvx512Bf16 && __builtin_cpu_is("intel") != 0;
#else
  const bool slow = false;
#endif
  if (choose_path(arithmetic) != paths[slow ? 1 : 0]) fail("choose_path", "not the fastest path without BF16KIT_KERNEL_PATH");
  for (const Path* path : paths) {
    setenv("BF16KIT_KERNEL_PATH", path->name, 1);
    if (choose_path(arithmetic) != path) fail("choose_path", std::string("not the path asked for, ") + path->name);
  }
#if defined(__x86_64__)
  const Path &rounding = kAvx512Bf16, &other = kAvx512;
#else
  const Path &rounding = kNeonBf16, &other = kNeon;
#endif
  setenv("BF16KIT_KERNEL_PATH", rounding.name, 1);
  const Path* wanted = !rounding.supported() ? nullptr : arithmetic == Arithmetic::kBf16 ? &rounding : &other;
  if (choose_path(arithmetic) != wanted) fail("choose_path", std::string("not the path that goes with ") + rounding.name);
  setenv("BF16KIT_KERNEL_PATH", "avx", 1);
  if (choose_path(arithmetic) != nullptr) fail("choose_path", "a path that does not exist");
}

// A negative sum so small that it rounds to zero: 0 + -0 = 0, on every path.
inline void check_signed_zero(Arithmetic arithmetic) {
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

// The modes that another library left in a thread's control register change no bits, and are restored afterwards.
inline void check_rounding_mode(Random& random) {
#if defined(__x86_64__)
  const std::initializer_list<uint64_t> modes = {0x9fc0, 0x1fc0, 0x7f80, 0x1f80};  // both flushed; operands; toward zero; default
#else
  const std::initializer_list<uint64_t> modes = {1 << 24, 3 << 22, 0};  // both flushed; toward zero; default
#endif
  for (const uint64_t left : modes) {
    Case c = draw(random);
    for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = random.normal() * (i % 2 == 0 ? 1e-37f : 1e-39f);
    for (const Path* path : supported_paths(c.arithmetic)) {
      const std::string where = std::string("rounding mode, path=") + path->name + " " + c.describe();
      const Exact<float> usual = compute(c, *path, 0, c.rows);
      const uint64_t before = RoundingMode::current();
      RoundingMode::set(left);
      const Exact<float> y = compute(c, *path, 0, c.rows);
      const uint64_t after = RoundingMode::current();
      RoundingMode::set(before);
      check_same(usual, y, 0, c.n, where, "with another mode in the thread");
      if (after != left) fail(where, "the thread's mode is not what it was");
    }
  }
}

// Parts of one product that begin at the same row, but have different numbers of rows: a kept copy of x must not be reused.
inline void check_kept_rows(Random& random) {
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

inline void check_particulars() {
  Random random(g_seed, 0);
  for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
    check_choice(arithmetic);
    check_signed_zero(arithmetic);
    check_constants(Layout::kPanels, Activation::kNone, arithmetic);
    check_constants(Layout::kTransposed, Activation::kRelu, arithmetic);
    for (Activation activation : kActivations) check_activation(activation, arithmetic, random);
  }
  check_kept_rows(random);
  for (int i = 0; i < 20; ++i) check_rounding_mode(random);
}

}  // namespace bf16kit
