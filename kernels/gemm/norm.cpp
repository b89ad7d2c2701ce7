#include "gemm/norm.h"

#include <algorithm>

#include "gemm/path.h"

namespace bf16kit {
namespace {

// As in parallel.cpp, in nanoseconds: what a part takes at least, and what is done before another thread is awake.
constexpr double kShortest = 16000, kAlone = 32000;
// What one core does in a nanosecond, about, of elements that other cores have just written.
constexpr double kElementsPerNs = 5;

struct Parted {
  const Norm& norm;
  const Path& path;
  int64_t rows;  // of a part
};

void run_part(void* context, size_t i) {
  const auto& parted = *static_cast<const Parted*>(context);
  const int64_t first = static_cast<int64_t>(i) * parted.rows;
  parted.path.normalise(parted.norm, first, std::min(parted.rows, parted.norm.rows - first));
}

}  // namespace

void normalise(const Norm& norm, const Path& path, RunNormParts run, void* threads) {
  if (norm.rows == 0) return;
  const double row = static_cast<double>(norm.width) / kElementsPerNs;
  if (row * static_cast<double>(norm.rows) < kAlone) return path.normalise(norm, 0, norm.rows);
  const auto each = static_cast<int64_t>(kShortest / row) + 1;
  Parted parted = {norm, path, each};
  run(threads, run_part, static_cast<size_t>((norm.rows + each - 1) / each), &parted);
}

}  // namespace bf16kit
