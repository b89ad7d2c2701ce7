#include "gemm/parallel.h"

#include <algorithm>
#include <atomic>

namespace bf16kit {
namespace {

// Duration of a part in nanoseconds. A shorter part is not worth waking a thread for; a longer one makes the other threads
// wait at the end. In between, longer parts are better, because a thread then keeps working on its rows.
constexpr double kShortest = 8000, kLongest = 64000;
// The approximate work of one core in a nanosecond. The estimate only decides how the work is divided, never the result.
constexpr double kMultipliesPerNs = 40, kBytesPerNs = 20;
// A product that is shorter than this number of longest parts is divided into about this number: kEnoughParts for few
// cores; with many, kPartsOfACore for each, so that all cores finish at about the same time.
constexpr double kEnoughParts = 64, kPartsOfACore = 4;

// The rows of a block are a multiple of this, which suits the tiles of every path. Only the last block may differ.
constexpr int64_t kTileRows = 12;

// Returns how long one core takes for some rows and one panel of `product`, in nanoseconds.
double duration(const Product& product, int64_t rows) {
  const double values = static_cast<double>(product.weight.k) * kPanel;
  const double multiplies = product.arithmetic == Arithmetic::kBf16 ? 2 * kMultipliesPerNs : kMultipliesPerNs;
  return std::max(values * rows / multiplies, 2 * values / kBytesPerNs);
}

// As few blocks of rows as possible, of about equal size, because the whole weight is read once for each block. Tall ones only
// as far as a weight of few panels leaves a part for each core.
int64_t blocks_of_rows(int64_t rows, int64_t panels, unsigned cores, bool tall) {
  const int64_t most = divide_up(rows, kRowBlock);
  return tall ? std::min(most, std::max(divide_up(rows, kTallBlock), divide_up(cores, panels))) : most;
}

// Returns the number of panels of a part with `block` rows, if all of the work takes one core `whole` nanoseconds.
int64_t panels_of_a_chunk(const Product& product, int64_t block, double whole, unsigned cores) {
  const double wanted = std::min(kLongest, std::max(kShortest, whole / std::max(kEnoughParts, kPartsOfACore * cores)));
  return static_cast<int64_t>(wanted / duration(product, block)) + 1;
}

// The bounds of part i when `total` is cut into `parts` nearly equal ones.
int64_t bound(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

}  // namespace

bool multiply(Product* products, size_t count, const Path& path, RunParts run, void* threads, unsigned cores) {
  static std::atomic<uint64_t> ids{0};
  const int64_t rows = products[0].rows;
  if (rows == 0) return true;
  int64_t all = 0, copied = 0;  // panels, and those whose blocks are copied
  for (size_t i = 0; i < count; ++i) {
    const Weight& weight = products[i].weight;
    all += weight.panels();
    copied += weight.layout == Layout::kTransposed ? weight.panels() : weight.n % kPanel != 0;
  }
  const bool tall = path.tall && 3 * copied >= all;
  const int64_t blocks = blocks_of_rows(rows, all, cores, tall);
  const int64_t block_rows = divide_up(divide_up(rows, blocks), kTileRows) * kTileRows;
  const double whole = duration(products[0], rows) * static_cast<double>(all);
  const int64_t each = panels_of_a_chunk(products[0], std::min(rows, block_rows), whole, cores);
  const uint64_t id = ++ids;
  int64_t chunks[kMostProducts], all_chunks = 0;  // the number of chunks that each product's panels are divided into
  for (size_t i = 0; i < count; ++i) {
    products[i].id = id;  // the same for all, because they have the same x
    chunks[i] = divide_up(products[i].weight.panels(), each);
    all_chunks += chunks[i];
  }
  std::atomic<bool> failed{false};
  do_parts(whole, run, threads, divide_up(rows, block_rows) * all_chunks, [&](int64_t i) {
    // Consecutive parts have the same rows, so that a thread reuses its copy of them, and neighbouring panels, the next of which
    // a tile prefetches.
    const int64_t row = i / all_chunks * block_rows;
    int64_t chunk = i % all_chunks;
    size_t which = 0;
    for (; chunk >= chunks[which]; ++which) chunk -= chunks[which];
    const Product& product = products[which];
    const int64_t panels = product.weight.panels(), panel = bound(panels, chunks[which], chunk);
    const Part part = {row, std::min(block_rows, rows - row), panel, bound(panels, chunks[which], chunk + 1) - panel};
    if (!path.compute(product.arithmetic)(product, part)) failed = true;
  });
  return !failed;
}

}  // namespace bf16kit
