// Neon, which every 64-bit Arm processor has: 4 lanes and 32 registers; a tile is 2 rows of a whole panel, or 8 rows of a quarter
// of one. Included by all paths with Neon, each in its own namespace.
struct Simd {
  using reg = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kRows = 8;
  static constexpr int kWideRows = 2;
  static constexpr int kTwoPanelRows = 1;
  static constexpr int kDots = 24;  // sums of a recurrence that a tile holds in registers

  static reg zero() { return vdupq_n_f32(0); }
  static reg broadcast(const float* p) { return vld1q_dup_f32(p); }
  static reg load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, reg v) { vst1q_f32(p, v); }
  static reg add(reg a, reg b) { return vaddq_f32(a, b); }
  static reg fma(reg a, reg b, reg c) { return vfmaq_f32(c, a, b); }
  static reg fms(reg a, reg b, reg c) { return vfmaq_f32(vnegq_f32(c), a, b); }
  static reg set(float value) { return vdupq_n_f32(value); }
  static reg sub(reg a, reg b) { return vsubq_f32(a, b); }
  static reg mul(reg a, reg b) { return vmulq_f32(a, b); }
  static reg div(reg a, reg b) { return vdivq_f32(a, b); }
  // Not vminq_f32 and vmaxq_f32: they return NaN if either operand is NaN.
  static reg min(reg a, reg b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static reg max(reg a, reg b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static reg abs(reg a) { return vabsq_f32(a); }
  static reg to_exponent(reg a) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), 23)); }
  static void unpack(const uint16_t* p, reg& even, reg& odd) {
    const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(p));
    even = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
    odd = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000)));
  }
  static void interleave(reg even, reg odd, reg& low, reg& high) {
    low = vzip1q_f32(even, odd);
    high = vzip2q_f32(even, odd);
  }
};
