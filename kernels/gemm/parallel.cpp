#include "gemm/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace bf16kit {
namespace {

// A part shorter than this, in nanoseconds, is not worth waking a thread for; one that is longer makes the others wait
// at the end. In between, longer ones are better: a thread then stays with its rows.
constexpr double kShortest = 8000, kLongest = 64000;
// What one core does in a nanosecond, about: the estimate only decides how work is parted, never what comes out.
constexpr double kMultipliesPerNs = 40, kBytesPerNs = 20;
// A product that takes less than so many of the longest parts is cut into about so many: what suffices for a few cores,
// and what a core of many needs to be done when the others are.
constexpr double kEnoughParts = 64, kPartsOfACore = 4;

// Rows of a block are a multiple of what every path's tiles are made for, but in the last.
constexpr int64_t kTileRows = 12;

struct Parted {
  const Product* products;
  size_t count;
  const Path& path;
  int64_t block_rows;
  int64_t chunks[kMostProducts];  // of each product's panels
  int64_t all_chunks;
  std::atomic<bool> failed{false};
};

// How long one core takes for some rows and one panel of `product`, in nanoseconds.
double duration(const Product& product, int64_t rows) {
  const double values = static_cast<double>(product.weight.k) * kPanel;
  const double multiplies = product.arithmetic == Arithmetic::kBf16 ? 2 * kMultipliesPerNs : kMultipliesPerNs;
  return std::max(values * rows / multiplies, 2 * values / kBytesPerNs);
}

// Panels of a part of `block` rows, where all of it takes `whole` nanoseconds.
int64_t panels_of_a_chunk(const Product& product, int64_t block, double whole, unsigned cores) {
  const double wanted = std::min(kLongest, std::max(kShortest, whole / std::max(kEnoughParts, kPartsOfACore * cores)));
  return static_cast<int64_t>(wanted / duration(product, block)) + 1;
}

// The bounds of part i when `total` is cut into `parts` nearly equal ones.
int64_t bound(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

void run_part(void* context, size_t i) {
  auto& parted = *static_cast<Parted*>(context);
  const auto index = static_cast<int64_t>(i);
  // Neighbours have the same rows, which the thread has copied already.
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

unsigned available_cores() {
  static const unsigned cores = std::thread::hardware_concurrency();
  return cores;
}

bool multiply(Product* products, size_t count, const Path& path, RunParts run, void* threads, unsigned cores) {
  static std::atomic<uint64_t> ids{0};
  const int64_t rows = products[0].rows;
  if (rows == 0) return true;
  // As few blocks as possible, about equal: the weight is read once for each.
  const int64_t fewest = divide_up(rows, kRowBlock);
  Parted parted = {products, count, path, divide_up(divide_up(rows, fewest), kTileRows) * kTileRows, {}, 0};
  int64_t all = 0;
  for (size_t i = 0; i < count; ++i) all += products[i].weight.panels();
  const double whole = duration(products[0], rows) * static_cast<double>(all);
  const int64_t each = panels_of_a_chunk(products[0], std::min(rows, parted.block_rows), whole, cores);
  const uint64_t id = ++ids;
  for (size_t i = 0; i < count; ++i) {
    products[i].id = id;  // one for all: it stands for x
    parted.chunks[i] = divide_up(products[i].weight.panels(), each);
    parted.all_chunks += parted.chunks[i];
  }
  const auto parts = static_cast<size_t>(divide_up(rows, parted.block_rows) * parted.all_chunks);
  do_parts(whole, run, threads, run_part, parts, &parted);
  return !parted.failed;
}

}  // namespace bf16kit
