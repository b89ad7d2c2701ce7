#include "gemm/norm.h"

#include "gemm/path.h"

namespace bf16kit {

void normalise(const Norm& norm, const Path& path, RunParts run, void* threads) {
  // The approximate number of elements that one core processes in a nanosecond, if other cores have just written them.
  constexpr double kElementsPerNs = 5;
  if (norm.rows == 0) return;
  const double row = static_cast<double>(norm.width) / kElementsPerNs;
  do_rows(norm.rows, row, run, threads, [&](int64_t first, int64_t count) { path.normalise(norm, first, count); });
}

}  // namespace bf16kit
