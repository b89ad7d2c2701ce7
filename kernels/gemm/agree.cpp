#include "gemm/agree.h"

#include <cstring>

namespace bf16kit {
namespace {

// Three tiles of rows that overlap; a whole chain and one with an incomplete step; a whole panel and a narrow one.
constexpr int64_t kRows = 37, kDepth = kChain + 36, kColumns = kPanel + 8;

class Draw {
 public:
  explicit Draw(Operands operands) : operands_(operands) {}

  float x() {
    switch (operands_) {
      case Operands::kExact: return one_of({1, -1, 1 + 0x1p-8f, 1 + 0x3p-9f});  // the last two: a tie, and above the middle
      case Operands::kTiny: return float_of(0, between(63, 65));
      default: return value();
    }
  }
  uint16_t w() {
    const float value = operands_ == Operands::kExact ? one_of({1, -1, 64, -64}) : x();
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
  }

 private:
  float value() {
    if (operands_ == Operands::kWide) return float_of(between(0, 1), between(60, 192));
    if (operands_ == Operands::kSpecial && between(0, 199) == 0) return float_of(between(0, 1), between(0, 1) * 255);
    if (operands_ == Operands::kSpecial && between(0, 499) == 0) return one_of({__builtin_inff(), -__builtin_inff(), 0.0f, -0.0f});
    return float_of(between(0, 1), between(118, 131));
  }
  float one_of(const float (&values)[4]) { return values[between(0, 3)]; }
  uint32_t between(uint32_t low, uint32_t high) { return low + bits() % (high - low + 1); }
  uint32_t bits() {  // Knuth's linear congruential generator
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float float_of(uint32_t sign, uint32_t exponent) {
    const uint32_t bits = sign << 31 | exponent << 23 | (this->bits() & 0x7fffff);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  Operands operands_;
  uint64_t state_ = 1;
};

bool same(float a, float b) { return (a != a && b != b) || std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

bool agree(const Path& together, const Path& alone, Operands operands) {
  float x[kRows * kDepth], ys[2][kRows * kColumns];
  uint16_t w[kDepth * kColumns];
  Draw draw(operands);
  for (float& value : x) value = draw.x();
  for (uint16_t& value : w) value = draw.w();
  Product product = {x, kRows, {w, kDepth, kColumns, Layout::kPanels}, nullptr, Activation::kNone, Arithmetic::kBf16, ys[0], 0};
  product.id = ~static_cast<uint64_t>(operands);  // far from the ids of multiply()
  const int64_t panels = product.weight.panels();
  bool done = together.bf16(product, {0, kRows, 0, panels});
  product.y = ys[1];
  for (int64_t row = 0, rows; row < kRows; row += rows) {
    rows = row % 3 + 1 < kRows - row ? row % 3 + 1 : kRows - row;
    done = alone.bf16(product, {row, rows, 0, panels}) && done;
  }
  for (int64_t i = 0; i < kRows * kColumns; ++i) done = done && same(ys[0][i], ys[1][i]);
  return done;
}

}  // namespace bf16kit
