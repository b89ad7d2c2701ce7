#include "gemm/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "gemm/path.h"

namespace bf16kit {
namespace {

// The least work that is worth a separate part, in nanoseconds.
constexpr double kShortest = 16000;
// The approximate work of one core in a nanosecond: multiplications, and copied elements of keys and values.
constexpr double kMultipliesPerNs = 40, kCopiesPerNs = 4;
// The exponential of a score takes as long as this number of multiplications.
constexpr double kSoftening = 32;

// The rows of a part are a multiple of this, which suits the tiles of every path. Only the last part may differ.
constexpr int64_t kTileRows = 12;

// Return how long one core takes, in nanoseconds, for one row, and to copy the keys and values of a head.
double duration(const Attention& a) {
  return static_cast<double>(a.keys) * (static_cast<double>(a.depth + a.width) + kSoftening) / kMultipliesPerNs;
}
double copying(const Attention& a) {
  return static_cast<double>(a.keys) * static_cast<double>(a.depth + a.width) / kCopiesPerNs;
}

// Returns the rows of a part: all rows of a head, unless they take so long that dividing them is worth copying the head's
// keys and values several times.
int64_t rows_of_a_part(const Attention& a) {
  const double least = std::max(kShortest, 4 * copying(a));
  const auto rows = static_cast<int64_t>(std::min(least / duration(a), 1e9)) + 1;
  return std::min(a.rows(), divide_up(rows, kTileRows) * kTileRows);
}

}  // namespace

bool attend(Attention& attention, const Path& path, RunParts run, void* threads) {
  static std::atomic<uint64_t> ids{0};
  const int64_t rows = attention.batch * attention.heads * attention.queries;
  if (rows == 0) return true;
  if (attention.keys == 0) {  // empty sums
    std::memset(attention.y, 0, sizeof(float) * static_cast<size_t>(rows * attention.width));
    return true;
  }
  attention.id = ++ids;
  // The rows of a part, and the parts that one head's rows are divided into.
  const int64_t each = rows_of_a_part(attention), chunks = divide_up(attention.rows(), each);
  const int64_t groups = attention.batch * attention.kv_heads;
  const double whole = duration(attention) * static_cast<double>(rows) + copying(attention) * static_cast<double>(groups);
  const Attend compute = attention.arithmetic == Arithmetic::kFp32 ? path.attend : path.attend_bf16;
  std::atomic<bool> failed{false};
  do_parts(whole, run, threads, groups * chunks, [&](int64_t i) {
    const int64_t head = i / chunks, first = i % chunks * each;
    const AttentionPart part = {head / attention.kv_heads, head % attention.kv_heads, first,
                                std::min(each, attention.rows() - first)};
    if (!compute(attention, part)) failed = true;
  });
  return !failed;
}

}  // namespace bf16kit
