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

struct Parted {
  const Product& product;
  const Path& path;
  int64_t blocks;  // of rows
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

// The bounds of part i when `total` is cut into `parts` nearly equal ones.
int64_t bound(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

void run_part(void* context, size_t i) {
  auto& parted = *static_cast<Parted*>(context);
  const auto index = static_cast<int64_t>(i);
  // Neighbours have the same rows, which the thread has copied already.
  const int64_t block = index / parted.chunks, chunk = index % parted.chunks;
  const int64_t row = bound(parted.product.rows, parted.blocks, block);
  const int64_t panel = bound(parted.product.weight.panels(), parted.chunks, chunk);
  const Part part = {row, bound(parted.product.rows, parted.blocks, block + 1) - row, panel,
                     bound(parted.product.weight.panels(), parted.chunks, chunk + 1) - panel};
  if (!parted.path.compute(parted.product, part)) parted.failed = true;
}

}  // namespace

bool multiply(Product product, const Path& path, RunParts run, void* threads) {
  static std::atomic<uint64_t> products{0};
  if (product.rows == 0) return true;
  product.id = ++products;
  const int64_t blocks = (product.rows + kRowBlock - 1) / kRowBlock;
  const int64_t each = panels_of_a_chunk(product, product.rows / blocks);
  Parted parted = {product, path, blocks, (product.weight.panels() + each - 1) / each};
  const auto parts = static_cast<size_t>(blocks * parted.chunks);
  if (parts == 1) {
    run_part(&parted, 0);
  } else {
    run(threads, run_part, parts, &parted);
  }
  return !parted.failed;
}

}  // namespace bf16kit
