// Sets the rounding mode and the treatment of subnormals of a thread that computes a part, so that all threads agree.
#pragma once

#include "gemm/path.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bf16kit {

// Sets both for its lifetime, then restores the previous modes. Another library may have left flush-to-zero on in some
// threads only; the bits of a row would then depend on the thread that computes it. Does nothing on processors other than
// x86-64.
class RoundingMode {
 public:
#if defined(__x86_64__)
  explicit RoundingMode(Arithmetic arithmetic) : before_(_mm_getcsr()) {
    const unsigned wanted = arithmetic == Arithmetic::kBf16 ? kDefault | kFlushToZero | kSubnormalsAreZero : kDefault;
    if (before_ != wanted) _mm_setcsr(wanted);
  }
  // Also restores the exception flags, so that the arithmetic done here sets none for the caller.
  ~RoundingMode() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // round to nearest, all exceptions masked
  // vdpbf16ps always does this, whatever MXCSR says.
  static constexpr unsigned kFlushToZero = 0x8000, kSubnormalsAreZero = 0x0040;
  unsigned before_;
#else
  explicit RoundingMode(Arithmetic) {}
  ~RoundingMode() {}
#endif
 public:
  RoundingMode(const RoundingMode&) = delete;
};

}  // namespace bf16kit
