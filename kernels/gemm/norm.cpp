#include "gemm/norm.h"

#include <algorithm>

#include "gemm/path.h"

namespace bf16kit {
namespace {

// The shortest part, in nanoseconds.
constexpr double kShortest = 16000;
// The approximate number of elements that one core processes in a nanosecond, if other cores have just written them.
constexpr double kElementsPerNs = 5;

struct Parted {
  const Norm& norm;
  const Path& path;
  int64_t rows;  // the rows of a part
};

void run_part(void* context, size_t i) {
  const auto& parted = *static_cast<const Parted*>(context);
  const int64_t first = static_cast<int64_t>(i) * parted.rows;
  parted.path.normalise(parted.norm, first, std::min(parted.rows, parted.norm.rows - first));
}

}  // namespace

void normalise(const Norm& norm, const Path& path, RunParts run, void* threads) {
  if (norm.rows == 0) return;
  const double row = static_cast<double>(norm.width) / kElementsPerNs;
  // For a width of 0 the quotient is infinite, hence the minimum.
  const auto each = static_cast<int64_t>(std::min(kShortest / row, static_cast<double>(norm.rows))) + 1;
  Parted parted = {norm, path, each};
  const double whole = row * static_cast<double>(norm.rows);
  do_parts(whole, run, threads, run_part, static_cast<size_t>(divide_up(norm.rows, each)), &parted);
}

}  // namespace bf16kit
