// Rounds weights, and computes what rounding removes. Python calls these functions (bf16kit/numerics/rounding.py), not ONNX Runtime. All
// paths give the same bits, so BF16KIT_KERNEL_PATH has no effect here.
#include <cstdint>

namespace bf16kit {
namespace {

struct Census {
  int64_t nan, inf, overflow, subnormal, flushed;
  int32_t largest, smallest;  // patterns of the largest and the smallest nonzero finite magnitude; they start at 0 and INT32_MAX
};

struct Loops {
  void (*round)(const uint32_t*, uint16_t*, int64_t);
  int64_t (*part)(const uint32_t*, const uint16_t*, uint16_t*, int64_t*, int64_t);
  void (*join)(const uint16_t*, const uint16_t*, uint32_t*, int64_t);
  void (*census)(const uint32_t*, int64_t, Census*);
};

namespace plain {
#include "loops.inl"
}  // namespace plain

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#include "loops.inl"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

const Loops& loops() {
#if defined(__x86_64__)
  static const Loops kAvx2 = {avx2::round_all, avx2::part_all, avx2::join_all, avx2::census_all};
  if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
  static const Loops kPlain = {plain::round_all, plain::part_all, plain::join_all, plain::census_all};
  return kPlain;
}

}  // namespace
}  // namespace bf16kit

extern "C" {

// Rounds fp32 patterns to bf16 patterns: to nearest, ties to even; NaN becomes the quiet NaN of its sign.
__attribute__((visibility("default"))) void bf16kit_round(const uint32_t* from, uint16_t* to, int64_t count) {
  bf16kit::loops().round(from, to, count);
}

// Computes the low halves that restore `from` from `stored`. Writes the indices of elements that cannot be restored to `odd`,
// which has room for `count`. Returns the number of these elements.
__attribute__((visibility("default"))) int64_t bf16kit_part(const uint32_t* from, const uint16_t* stored, uint16_t* low,
                                                            int64_t* odd, int64_t count) {
  return bf16kit::loops().part(from, stored, low, odd, count);
}

// Restores the fp32 patterns from both halves, for all elements that are not in `odd`.
__attribute__((visibility("default"))) void bf16kit_join(const uint16_t* stored, const uint16_t* low, uint32_t* to,
                                                         int64_t count) {
  bf16kit::loops().join(stored, low, to, count);
}

// Adds to `census` how rounding would change `from`: the numbers of NaN, infinite, overflowing, subnormal and flushed elements,
// and the largest and smallest magnitudes.
__attribute__((visibility("default"))) void bf16kit_census(const uint32_t* from, int64_t count, void* census) {
  bf16kit::loops().census(from, count, static_cast<bf16kit::Census*>(census));
}
}
