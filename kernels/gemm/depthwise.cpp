#include "gemm/image.h"

#include <algorithm>

#include "gemm/path.h"

namespace bf16kit {
namespace {

// The shortest part, in nanoseconds, and the approximate number of multiplications of one core in a nanosecond.
constexpr double kShortest = 16000, kMultipliesPerNs = 12;

struct Parted {
  const Depthwise& depthwise;
  const Path& path;
  int64_t rows;  // the rows of the output in a part
};

void run_part(void* context, size_t i) {
  const auto& parted = *static_cast<const Parted*>(context);
  const int64_t first = static_cast<int64_t>(i) * parted.rows;
  const int64_t all = parted.depthwise.batch * parted.depthwise.image.out_height;
  parted.path.convolve(parted.depthwise, first, std::min(parted.rows, all - first));
}

}  // namespace

void convolve(const Depthwise& depthwise, const Path& path, RunParts run, void* threads) {
  const Image& image = depthwise.image;
  const int64_t rows = depthwise.batch * image.out_height;
  if (rows == 0 || image.out_width == 0) return;
  const double taps = static_cast<double>(image.kernel[0]) * static_cast<double>(image.kernel[1]);
  const double row = taps * static_cast<double>(image.channels) * static_cast<double>(image.out_width) / kMultipliesPerNs;
  const auto each = static_cast<int64_t>(kShortest / row) + 1;
  Parted parted = {depthwise, path, each};
  do_parts(row * static_cast<double>(rows), run, threads, run_part, static_cast<size_t>(divide_up(rows, each)), &parted);
}

}  // namespace bf16kit
