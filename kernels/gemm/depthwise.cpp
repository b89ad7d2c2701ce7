#include "gemm/image.h"

#include "gemm/path.h"

namespace bf16kit {

void convolve(const Depthwise& depthwise, const Path& path, RunParts run, void* threads) {
  constexpr double kMultipliesPerNs = 12;  // of one core, approximately
  const Image& image = depthwise.image;
  const int64_t rows = depthwise.batch * image.out_height;
  if (rows == 0 || image.out_width == 0) return;
  const double taps = static_cast<double>(image.kernel[0]) * static_cast<double>(image.kernel[1]);
  const double row = taps * static_cast<double>(image.channels) * static_cast<double>(image.out_width) / kMultipliesPerNs;
  do_rows(rows, row, run, threads, [&](int64_t first, int64_t count) { path.convolve(depthwise, first, count); });
}

}  // namespace bf16kit
