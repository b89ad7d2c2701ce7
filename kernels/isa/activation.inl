// The activations, for any instruction set. Each isa/*.cpp includes this file in its own namespace, after its struct Simd and
// before tile.inl.
//
// Every path runs the same sequence of IEEE operations, so that avx2 and avx512f give the same bits (except the payload of a
// NaN). The compiler must find nothing to fuse, as GCC does even with intrinsics: a product plus a term is written as fma, and
// no sum below has a plain product as an operand.
//
// Simd has: max, add, sub, mul, div, fma of vectors; set (one float to all lanes), abs; min and max as on x86:
// min(a, b) = a < b ? a : b and max(a, b) = a > b ? a : b, so that the result is b if either is NaN;
// fms(a, b, c) = a * b - c rounded once, on every path; to_exponent, which shifts the bits of each lane left by 23.
//
// With t = |x|, all three smooth activations are
//     x * F(x) = max(0, x) - t * F(-t),    F(-t) in [0, 1/2]
// because F(x) = 1 - F(-x). The subtrahend is at most half of the minuend, so there is no cancellation, and for negative x the
// result keeps its relative precision down to the smallest normal number. Gelu: F is the normal distribution function;
// SiLU: F = sigmoid; Gelu (tanh): 0.5 * (1 + tanh(u)) = sigmoid(2u), so F is sigmoid again.
// At -inf, x * F(x) is -inf * 0 = NaN, as ONNX's definition of the operators gives, and not the limit. NaN stays NaN: every
// step keeps it, whatever the exponent's bits become.
// Error against float64 for normal results: Gelu 5.3, Gelu (tanh) 3.2, SiLU 3.3 units in the last place (the largest among
// every seventh float with |x| <= 20); property_test.cpp allows 6.

// Intermediate exponents are 64 too high. The last operation lowers them, so that only it rounds to a subnormal result.
constexpr float kLowered = 0x1p-64f;

// 2^(a * b + c * d) * 2^64 for sums in [-160, 63], where c * d is a small correction of a * b.
inline Simd::reg exp2_raised(Simd::reg a, Simd::reg b, Simd::reg c, Simd::reg d) {
  // Adding 1.5 * 2^23 rounds to an integer n in the low bits. With 127 + 64, these are the biased exponent of 2^(n + 64).
  const Simd::reg magic = Simd::set(12582912.0f + 127 + 64);
  const Simd::reg biased = Simd::fma(a, b, magic);
  const Simd::reg f = Simd::fma(c, d, Simd::fms(a, b, Simd::sub(biased, magic)));
  // 2^f for |f| <= 0.5: minimax in relative error (linear programming), |relative error| <= 2^-28.3. The first two coefficients
  // are fixed at 1 and ln 2. The others were rounded to fp32 one after the other, and the rest fitted again each time.
  Simd::reg p = Simd::set(0x1.4173c6p-13f);
  p = Simd::fma(p, f, Simd::set(0x1.5f0988p-10f));
  p = Simd::fma(p, f, Simd::set(0x1.3b2ddap-7f));
  p = Simd::fma(p, f, Simd::set(0x1.c6af7ap-5f));
  p = Simd::fma(p, f, Simd::set(0x1.ebfbdcp-3f));
  p = Simd::fma(p, f, Simd::set(0x1.62e430p-1f));
  p = Simd::fma(p, f, Simd::set(1.0f));
  return Simd::mul(p, Simd::to_exponent(biased));
}

// max(0, x) - part / 2^64 + 0 * min(0, x); the last term only has an effect at -inf, where it is NaN.
inline Simd::reg less(Simd::reg x, Simd::reg part) {
  const Simd::reg result = Simd::fma(part, Simd::set(-kLowered), Simd::max(Simd::zero(), x));
  return Simd::fma(Simd::min(Simd::zero(), x), Simd::zero(), result);
}

// max(0, x) - t * e / (1 + e) for e = raised / 2^64
inline Simd::reg less_sigmoid(Simd::reg x, Simd::reg t, Simd::reg raised) {
  return less(x, Simd::div(Simd::mul(t, raised), Simd::fma(raised, Simd::set(kLowered), Simd::set(1.0f))));
}

template <Activation kActivation>
Simd::reg activate(Simd::reg x);

template <>
inline Simd::reg activate<Activation::kNone>(Simd::reg x) {
  return x;
}

template <>
inline Simd::reg activate<Activation::kRelu>(Simd::reg x) {
  return Simd::max(Simd::zero(), x);
}

template <>
inline Simd::reg activate<Activation::kRelu6>(Simd::reg x) {
  return Simd::min(Simd::set(6.0f), Simd::max(Simd::zero(), x));
}

// x * sigmoid(x)
template <>
inline Simd::reg activate<Activation::kSilu>(Simd::reg x) {
  const Simd::reg t = Simd::min(Simd::set(110.0f), Simd::abs(x));  // 110 * e^-110 rounds to zero
  // log2(e), in two parts
  return less_sigmoid(x, t, exp2_raised(t, Simd::set(-1.44269502f), t, Simd::set(-1.92596303e-08f)));
}

// x * sigmoid(2u) with u = sqrt(2/pi) * (x + 0.044715 * x^3). The exponent, -2u * log2(e) = -t * (a + b * t^2), is up to 126
// for normal results. Its absolute error becomes the result's relative error, so every rounding is compensated.
template <>
inline Simd::reg activate<Activation::kGeluTanh>(Simd::reg x) {
  const Simd::reg t = Simd::min(Simd::set(11.0f), Simd::abs(x));  // e^-2u = 2^-162 there, which rounds to zero
  const Simd::reg square = Simd::mul(t, t), square_low = Simd::fms(t, t, square);
  // a = 2 * sqrt(2/pi) * log2(e); its upper part is a multiple of 2^-20, so that s + a is exact below. b = 0.044715 * a.
  const Simd::reg a = Simd::set(2.302207947f), a_low = Simd::set(2.5136697e-07f);
  const Simd::reg b = Simd::set(-0.102943242f), b_low = Simd::set(2.01619854e-09f);
  const Simd::reg s = Simd::fma(square, b, Simd::sub(Simd::zero(), a));
  Simd::reg s_low = Simd::fms(square, b, Simd::add(s, a));
  s_low = Simd::fma(square, b_low, s_low);
  s_low = Simd::fma(square_low, b, s_low);
  s_low = Simd::sub(s_low, a_low);
  return less_sigmoid(x, t, exp2_raised(t, s, t, s_low));
}

// x * Phi(x), with Phi(-t) = 0.5 * erfc(t / sqrt(2)) = e^(-t^2 / 2) * R(t)
template <>
inline Simd::reg activate<Activation::kGelu>(Simd::reg x) {
  const Simd::reg t = Simd::min(Simd::set(14.5f), Simd::abs(x));  // 14.5 * Phi(-14.5) = 2^-152.7 rounds to zero
  const Simd::reg square = Simd::mul(t, t), square_low = Simd::fms(t, t, square);
  // log2(e) / 2 in its upper part c, and the lower part relative to it
  const Simd::reg c = Simd::set(-0.721347511f);
  const Simd::reg raised = exp2_raised(square, c, Simd::fma(square, Simd::set(1.33497583e-08f), square_low), c);
  // R(t) = 0.5 * erfcx(t / sqrt(2)) on [0, 14.5] is approximated by (1/2 + p(t) / q(t)) / (t + 2), with p and q of degree 4:
  // minimax in relative error (Remez in 160-bit arithmetic: 2^-26.1). The coefficients were rounded to fp32, then the best
  // combination of neighbouring floats was searched for: |relative error| <= 2^-25.5. In this form p is a small correction of
  // q / 2, so its roundings matter little. The roundings of q are in both numerator and denominator and mostly cancel. The pole
  // at -2 is near the optimal one (-2.076), and the product with 2 is exact.
  Simd::reg p = Simd::set(-0.00237332867f);
  p = Simd::fma(p, t, Simd::set(0.000992762973f));
  p = Simd::fma(p, t, Simd::set(0.0654944107f));
  p = Simd::fma(p, t, Simd::set(0.304031938f));
  p = Simd::fma(p, t, Simd::set(0.5f));
  Simd::reg q = Simd::set(0.0234850775f);
  q = Simd::fma(q, t, Simd::set(0.175580636f));
  q = Simd::fma(q, t, Simd::set(0.64606142f));
  q = Simd::fma(q, t, Simd::set(1.20383465f));
  q = Simd::fma(q, t, Simd::set(1.0f));
  const Simd::reg numerator = Simd::fma(q, Simd::set(0.5f), p);
  const Simd::reg denominator = Simd::fma(q, t, Simd::add(q, q));
  return less(x, Simd::div(Simd::mul(Simd::mul(t, raised), numerator), denominator));
}

// Returns f with the activation as a constant: f(std::integral_constant<Activation, …>()).
template <typename F>
auto with_constant(Activation activation, const F& f) {
  switch (activation) {
    case Activation::kRelu: return f(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kGelu: return f(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluTanh: return f(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kSilu: return f(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kRelu6: return f(std::integral_constant<Activation, Activation::kRelu6>());
    case Activation::kNone: break;
  }
  return f(std::integral_constant<Activation, Activation::kNone>());
}
