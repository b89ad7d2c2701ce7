// The rounding mode and the treatment of subnormals of the thread that computes a part: the same on every thread.
#pragma once

#include "gemm/path.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bf16kit {

// Sets them for as long as it lives and restores what was there: another library may have left flush-to-zero on in one
// thread and not in the other, and rows would have other bits by the thread that computes them. Processors other than
// x86-64 keep theirs.
class RoundingMode {
 public:
#if defined(__x86_64__)
  explicit RoundingMode(Arithmetic arithmetic) : before_(_mm_getcsr()) {
    const unsigned wanted = arithmetic == Arithmetic::kBf16 ? kDefault | kFlushToZero | kSubnormalsAreZero : kDefault;
    if (before_ != wanted) _mm_setcsr(wanted);
  }
  // With it go the flags that say what happened, which nobody may see of the arithmetic done here.
  ~RoundingMode() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // to nearest, no exception
  // What vdpbf16ps does whatever MXCSR says.
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
