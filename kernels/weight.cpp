#include "weight.h"

#include <cstring>

namespace bf16kit {
namespace {

// Copies [length, width] to [length, 32], with zeros to the right.
void widen(const uint16_t* from, int64_t length, int64_t width, uint16_t* to) {
  std::memset(to, 0, sizeof(uint16_t) * length * kPanel);
  for (int64_t row = 0; row < length; ++row) std::memcpy(to + row * kPanel, from + row * width, sizeof(uint16_t) * width);
}

// Copies columns of [n, k], `stride` apart, to the rows of [length, 32], with zeros to the right.
void transpose(const uint16_t* from, int64_t stride, int64_t length, int64_t width, uint16_t* to) {
  if (width < kPanel) std::memset(to, 0, sizeof(uint16_t) * length * kPanel);
  // Tiles of 8 x 8 keep the lines that are read and written in the first-level cache.
  for (int64_t column = 0; column < width; column += 8) {
    const int64_t columns = width - column < 8 ? width - column : 8;
    for (int64_t row = 0; row < length; ++row) {
      for (int64_t c = 0; c < columns; ++c) to[row * kPanel + column + c] = from[(column + c) * stride + row];
    }
  }
}

}  // namespace

const uint16_t* block(const Weight& weight, int64_t panel, int64_t first, int64_t length, uint16_t* scratch) {
  const int64_t width = weight.width(panel);
  if (weight.layout == Layout::kTransposed) {
    transpose(weight.data + panel * kPanel * weight.k + first, weight.k, length, width, scratch);
    return scratch;
  }
  const uint16_t* stored = weight.data + panel * kPanel * weight.k + first * width;
  if (width == kPanel) return stored;
  widen(stored, length, width, scratch);
  return scratch;
}

}  // namespace bf16kit
