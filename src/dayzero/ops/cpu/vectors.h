// The vector of one instruction set and the dozen operations the kernels need. W floats wide. Everything has internal
// linkage: this file is compiled once per instruction set, and no function may be shared between them.
#pragma once
#include <cstring>
#include "kernels.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dayzero {
namespace {

inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline float widen(half x) {
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude << 13));
  // A half's exponent and mantissa shifted into float position are 2^-112 too small; the product is exact, subnormals too.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * bits_to_float(0x77800000)));
}
inline void narrow(float f, float& out) { out = f; }
inline void narrow(float f, bf16& out) {                       // round to nearest, ties to even; NaN stays NaN
  uint32_t u = float_to_bits(f), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  out.bits = uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}
inline void narrow(float f, half& out) {
  uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) { out.bits = uint16_t(sign | 0x7e00); return; }
  if (a >= 0x477ff000) { out.bits = uint16_t(sign | 0x7c00); return; }   // rounds to 65536 or more
  if (a < 0x38800000) {                                                  // subnormal: let the float adder round
    float t = bits_to_float(a) + 0.5f;
    out.bits = uint16_t(sign | (float_to_bits(t) - 0x3f000000)); return;
  }
  out.bits = uint16_t(sign | ((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13));
}

#if defined(__AVX512F__)
constexpr int W = 16;
typedef __m512 V;
inline __mmask16 first(int64_t n) { return __mmask16((1u << n) - 1); }
inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V widen16(__m256i u) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(u), 16)); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const bf16* p) { return widen16(_mm256_loadu_si256((const __m256i*)p)); }
inline V load(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline V load(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline V load(const bf16* p, int64_t n) { return widen16(_mm256_maskz_loadu_epi16(first(n), p)); }
inline V load(const half* p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, V v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V divide(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V maximum(V a, V b) { return _mm512_max_ps(a, b); }
inline V minimum(V a, V b) { return _mm512_min_ps(a, b); }
inline V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V times_two_to(V a, V n) { return _mm512_scalef_ps(a, n); }
inline void reduce4(V a, V b, V c, V d, float* out) {          // four sums over lanes, one fixed tree
  V ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)), cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  V s = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 t = _mm256_add_ps(_mm512_castps512_ps256(s), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(s), 1)));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
#elif defined(__AVX2__)
constexpr int W = 8;
typedef __m256 V;
inline V zero() { return _mm256_setzero_ps(); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline V load(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V load(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
template <class T> inline V load(const T* p, int64_t n) { T t[W] = {}; std::memcpy(t, p, n * sizeof(T)); return load(t); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline void store(float* p, V v, int64_t n) { float t[W]; store(t, v); std::memcpy(p, t, n * 4); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V divide(V a, V b) { return _mm256_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V maximum(V a, V b) { return _mm256_max_ps(a, b); }
inline V minimum(V a, V b) { return _mm256_min_ps(a, b); }
inline V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V times_two_to(V a, V n) {
  __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
inline void reduce4(V a, V b, V c, V d, float* out) {
  V s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
#else
constexpr int W = 4;                                           // compiler vectors: SSE2, NEON, or plain scalars
typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
inline V zero() { return V{0, 0, 0, 0}; }
inline V set1(float x) { return V{x, x, x, x}; }
inline V load(const float* p) { V v; std::memcpy(&v, p, 16); return v; }
template <class T> inline V load(const T* p) { return V{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
template <class T> inline V load(const T* p, int64_t n) { T t[W] = {}; std::memcpy(t, p, n * sizeof(T)); return load(t); }
inline void store(float* p, V v) { std::memcpy(p, &v, 16); }
inline void store(float* p, V v, int64_t n) { std::memcpy(p, &v, n * 4); }
inline V add(V a, V b) { return a + b; }
inline V sub(V a, V b) { return a - b; }
inline V mul(V a, V b) { return a * b; }
inline V divide(V a, V b) { return a / b; }
inline V fma(V a, V b, V c) { return a * b + c; }
inline V maximum(V a, V b) { return a > b ? a : b; }
inline V minimum(V a, V b) { return a < b ? a : b; }
inline V round(V a) { V magic = set1(12582912.0f); return (a + magic) - magic; }   // 1.5 * 2^23: |a| < 2^22
inline V times_two_to(V a, V n) { VI bits = (__builtin_convertvector(n, VI) + 127) << 23; V p; std::memcpy(&p, &bits, 16); return a * p; }
inline void reduce4(V a, V b, V c, V d, float* out) {
  out[0] = (a[0] + a[1]) + (a[2] + a[3]); out[1] = (b[0] + b[1]) + (b[2] + b[3]);
  out[2] = (c[0] + c[1]) + (c[2] + c[3]); out[3] = (d[0] + d[1]) + (d[2] + d[3]);
}
#endif

// exp to about 1 ulp (Cephes expf). Below -88 it is 0, above 88 it is exp(88).
inline V exponential(V x) {
  x = minimum(maximum(x, set1(-88.0f)), set1(88.0f));
  V n = round(mul(x, set1(1.44269504088896341f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return times_two_to(add(fma(p, mul(r, r), r), set1(1.0f)), n);
}

// cap * tanh(x / cap), absolute error about cap * 1e-7.
inline V soft_capped(V x, float cap) {
  V e = exponential(mul(x, set1(2.0f / cap)));
  return mul(set1(cap), sub(set1(1.0f), divide(set1(2.0f), add(e, set1(1.0f)))));
}

inline float lane_sum(V v) { float out[4]; reduce4(v, zero(), zero(), zero(), out); return out[0]; }
inline float lane_max(V v) {
  float t[W]; store(t, v);
  float m = t[0];
  for (int i = 1; i < W; i++) m = t[i] > m ? t[i] : m;
  return m;
}

template <class T> void widen_all(const T* source, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(source + i));
  for (; i < n; i++) out[i] = widen(source[i]);
}
template <class T> void narrow_all(const float* source, T* out, int64_t n) { for (int64_t i = 0; i < n; i++) narrow(source[i], out[i]); }

void to_f32(const void* source, DType type, float* out, int64_t n) {
  if (type == DType::f32) std::memcpy(out, source, n * 4);
  else if (type == DType::bf16) widen_all((const bf16*)source, out, n);
  else widen_all((const half*)source, out, n);
}
void from_f32(const float* source, void* out, DType type, int64_t n) {
  if (type == DType::f32) std::memcpy(out, source, n * 4);
  else if (type == DType::bf16) narrow_all(source, (bf16*)out, n);
  else narrow_all(source, (half*)out, n);
}
inline int64_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

}  // namespace
}  // namespace dayzero
