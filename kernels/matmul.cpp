#include "matmul.h"

#include <algorithm>
#include <atomic>

namespace bf16kit {
namespace {

// A part shorter than this, in nanoseconds, is not worth waking a thread for.
constexpr double kShortest = 8000;
// What one core does in a nanosecond, about: the estimate only decides how work is parted, never what comes out.
constexpr double kMultipliesPerNs = 40, kBytesPerNs = 20;
// More parts than this even out nothing more.
constexpr int64_t kMostChunks = 64;

// Rows of a block are a multiple of what every path's tiles are made for, but in the last.
constexpr int64_t kTileRows = 12;

struct Parted {
  const Product& product;
  const Path& path;
  int64_t block_rows;
  int64_t chunks;  // of panels
  std::atomic<bool> failed{false};
};

int64_t panels_of_a_chunk(const Product& product, int64_t rows) {
  const double values = static_cast<double>(product.weight.k) * kPanel;
  const double duration = std::max(values * rows / kMultipliesPerNs, 2 * values / kBytesPerNs);
  const int64_t panels = product.weight.panels();
  const auto worthwhile = static_cast<int64_t>(kShortest / duration) + 1;
  return std::min(panels, std::max(worthwhile, panels / kMostChunks));
}

int64_t divide_up(int64_t total, int64_t each) { return (total + each - 1) / each; }

// The bounds of part i when `total` is cut into `parts` nearly equal ones.
int64_t bound(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

void run_part(void* context, size_t i) {
  auto& parted = *static_cast<Parted*>(context);
  const auto index = static_cast<int64_t>(i);
  // Neighbours have the same rows, which the thread has copied already.
  const int64_t block = index / parted.chunks, chunk = index % parted.chunks;
  const int64_t row = block * parted.block_rows;
  const int64_t panel = bound(parted.product.weight.panels(), parted.chunks, chunk);
  const Part part = {row, std::min(parted.block_rows, parted.product.rows - row), panel,
                     bound(parted.product.weight.panels(), parted.chunks, chunk + 1) - panel};
  if (!parted.path.compute(parted.product, part)) parted.failed = true;
}

}  // namespace

bool multiply(Product product, const Path& path, RunParts run, void* threads) {
  static std::atomic<uint64_t> products{0};
  if (product.rows == 0) return true;
  product.id = ++products;
  // As few blocks as possible, about equal: the weight is read once for each.
  const int64_t fewest = divide_up(product.rows, kRowBlock);
  const int64_t block_rows = divide_up(divide_up(product.rows, fewest), kTileRows) * kTileRows;
  const int64_t each = panels_of_a_chunk(product, std::min(product.rows, block_rows));
  Parted parted = {product, path, block_rows, divide_up(product.weight.panels(), each)};
  const auto parts = static_cast<size_t>(divide_up(product.rows, block_rows) * parted.chunks);
  if (parts == 1) {
    run_part(&parted, 0);
  } else {
    run(threads, run_part, parts, &parted);
  }
  return !parted.failed;
}

}  // namespace bf16kit
