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

struct Parted {
  const Product* products;
  size_t count;
  const Path& path;
  int64_t block_rows;
  int64_t chunks[kMostProducts];  // the number of chunks that each product's panels are divided into
  int64_t all_chunks;
  std::atomic<bool> failed{false};
};

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

void run_part(void* context, size_t i) {
  auto& parted = *static_cast<Parted*>(context);
  const auto index = static_cast<int64_t>(i);
  // Consecutive parts have the same rows, so that a thread reuses its copy of them, and neighbouring panels, the next of which a
  // tile prefetches.
  const int64_t row = index / parted.all_chunks * parted.block_rows;
  int64_t chunk = index % parted.all_chunks;
  size_t which = 0;
  for (; chunk >= parted.chunks[which]; ++which) chunk -= parted.chunks[which];
  const Product& product = parted.products[which];
  const int64_t panels = product.weight.panels(), chunks = parted.chunks[which];
  const int64_t panel = bound(panels, chunks, chunk);
  const Part part = {row, std::min(parted.block_rows, product.rows - row), panel,
                     bound(panels, chunks, chunk + 1) - panel};
  if (!parted.path.compute(product.arithmetic)(product, part)) parted.failed = true;
}

}  // namespace

bool multiply(Product* products, size_t count, const Path& path, RunParts run, void* threads, unsigned cores) {
  static std::atomic<uint64_t> ids{0};
  const int64_t rows = products[0].rows;
  if (rows == 0) return true;
  int64_t all = 0;
  for (size_t i = 0; i < count; ++i) all += products[i].weight.panels();
  const bool tall = path.tall && products[0].weight.layout == Layout::kTransposed;
  const int64_t blocks = blocks_of_rows(rows, all, cores, tall);
  Parted parted = {products, count, path, divide_up(divide_up(rows, blocks), kTileRows) * kTileRows, {}, 0};
  const double whole = duration(products[0], rows) * static_cast<double>(all);
  const int64_t each = panels_of_a_chunk(products[0], std::min(rows, parted.block_rows), whole, cores);
  const uint64_t id = ++ids;
  for (size_t i = 0; i < count; ++i) {
    products[i].id = id;  // the same for all, because they have the same x
    parted.chunks[i] = divide_up(products[i].weight.panels(), each);
    parted.all_chunks += parted.chunks[i];
  }
  const auto parts = static_cast<size_t>(divide_up(rows, parted.block_rows) * parted.all_chunks);
  do_parts(whole, run, threads, run_part, parts, &parted);
  return !parted.failed;
}

}  // namespace bf16kit
