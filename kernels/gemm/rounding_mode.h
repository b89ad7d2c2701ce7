// Sets the rounding mode and the treatment of subnormals of a thread that computes a part, so that all threads agree.
#pragma once

#include "gemm/path.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bf16kit {

// Sets both for its lifetime, then restores the previous modes. Another library may have left flush-to-zero on in some
// threads only; the bits of a row would then depend on the thread that computes it. Does nothing on processors other than
// x86-64 and 64-bit Arm.
class RoundingMode {
 public:
  explicit RoundingMode(Arithmetic arithmetic) : before_(current()) {
    const uint64_t wanted = arithmetic == Arithmetic::kBf16 ? kDefault | kFlushed : kDefault;
    if (before_ != wanted) set(wanted);
  }
  ~RoundingMode() { set(before_); }
  RoundingMode(const RoundingMode&) = delete;

#if defined(__x86_64__)
  // MXCSR. It holds the exception flags as well, so that the arithmetic done here sets none for the caller.
  static uint64_t current() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }

 private:
  static constexpr uint64_t kDefault = 0x1f80;  // round to nearest, all exceptions masked
  // Operands and results: vdpbf16ps always does this, whatever MXCSR says.
  static constexpr uint64_t kFlushed = 0x8040;
#elif defined(__aarch64__)
  // FPCR. The exception flags, which are in FPSR, stay set.
  static uint64_t current() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }

 private:
  static constexpr uint64_t kDefault = 0;  // round to nearest, no exception trapped
  static constexpr uint64_t kFlushed = 1 << 24;  // FZ: operands and results
#else
  static uint64_t current() { return 0; }
  static void set(uint64_t) {}

 private:
  static constexpr uint64_t kDefault = 0, kFlushed = 0;
#endif
  uint64_t before_;
};

}  // namespace bf16kit
