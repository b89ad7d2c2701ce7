// The converter's operations on every weight, as loops that a compiler vectorises. Included once for each instruction set.
// A pattern is the bits of an fp32 or bf16 number as an integer. bf16kit/numerics/rounding.py and residual.py have the definitions.

inline uint16_t rounded(uint32_t bits) {
  const uint32_t nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // ties to even
  const uint32_t quiet = ((bits >> 16) & 0x8000u) | 0x7fc0u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest);
}

void round_all(const uint32_t* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = rounded(from[i]);
}

// stored + signed(low), with signed(low) in -32767 … 32768.
inline uint32_t near_to(uint32_t predicted, uint32_t low) {
  return predicted + low - (low > 0x8000u ? 0x10000u : 0u);
}

int64_t part_all(const uint32_t* from, const uint16_t* stored, uint16_t* low, int64_t* odd, int64_t count) {
  constexpr int64_t kBlock = 1024;
  int64_t found = 0;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t stop = start + kBlock < count ? start + kBlock : count;
    uint32_t any = 0;
    for (int64_t i = start; i < stop; ++i) {
      const uint32_t predicted = static_cast<uint32_t>(stored[i]) << 16;
      const uint32_t rest = (from[i] - predicted) & 0xffffu;
      low[i] = static_cast<uint16_t>(rest);
      any |= near_to(predicted, rest) ^ from[i];
    }
    if (any == 0) continue;
    for (int64_t i = start; i < stop; ++i) {
      const uint32_t predicted = static_cast<uint32_t>(stored[i]) << 16;
      if (near_to(predicted, low[i]) != from[i]) odd[found++] = i;
    }
  }
  return found;
}

void join_all(const uint16_t* stored, const uint16_t* low, uint32_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = near_to(static_cast<uint32_t>(stored[i]) << 16, low[i]);
}

// The result of a vector comparison: all ones, −1, if true.
inline int32_t mask(bool condition) { return -static_cast<int32_t>(condition); }

void census_all(const uint32_t* from, int64_t count, Census* census) {
  constexpr int64_t kBlock = 1 << 12;  // a block stays in the first-level cache from one loop to the next
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t stop = start + kBlock < count ? start + kBlock : count;
    // Signed, because AVX2 cannot compare unsigned numbers; magnitudes have 31 bits. Three loops, because GCC 12 vectorises
    // each of them, but not one loop with all.
    int32_t nan = 0, beyond = 0, overflow = 0, below = 0, flushed = 0, zero = 0, largest = 0;
    for (int64_t i = start; i < stop; ++i) {
      const int32_t magnitude = static_cast<int32_t>(from[i] & 0x7fffffffu);
      nan -= mask(magnitude > 0x7f800000);
      beyond -= mask(magnitude > 0x7f7fffff);
      overflow -= mask(magnitude > 0x7f7f7fff);
      below -= mask(magnitude < 0x007f8000);
      flushed -= mask(magnitude < 0x8001);
      zero -= mask(magnitude < 1);
    }
    for (int64_t i = start; i < stop; ++i) {
      const int32_t magnitude = static_cast<int32_t>(from[i] & 0x7fffffffu);
      const int32_t finite = magnitude > 0x7f7fffff ? 0 : magnitude;
      largest = finite > largest ? finite : largest;
    }
    uint32_t least = 0xffffffffu;  // minus 1, so that zero wraps around and counts as the largest
    for (int64_t i = start; i < stop; ++i) {
      const uint32_t shifted = (from[i] & 0x7fffffffu) - 1u;
      least = shifted < least ? shifted : least;
    }
    const int32_t inf = beyond - nan, subnormal = below - flushed;
    overflow -= beyond;
    flushed -= zero;
    census->nan += nan;
    census->inf += inf;
    census->overflow += overflow;
    census->subnormal += subnormal;
    census->flushed += flushed;
    if (largest > census->largest) census->largest = largest;
    const int32_t smallest = least < 0x7f7fffffu ? static_cast<int32_t>(least) + 1 : INT32_MAX;
    if (smallest < census->smallest) census->smallest = smallest;
  }
}
