// Codes to numbers in registers, for one instruction set. A decoder gives W numbers, (code - zero) * scale in float32, from
// the codes at p, which must have a whole block behind them. Codes that share a scale come in multiples of 32, but for the last of a row.
#pragma once
#include "vectors.h"

namespace dayzero {
namespace {

// Codes of one nibble, as numbers: integers are stored plus 8, floats are E2M1.
alignas(64) constexpr float kNibbleValues[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
alignas(64) constexpr float kFp4Values[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

// E4M3 in the place of a float's bits is 2^-120 too small, subnormals too; the product is exact.
constexpr int32_t kFp8Bits = int32_t(0x87f00000u);
constexpr float kFp8Factor = 0x1p120f;

template <class Widen, int Bias> struct ByteDecoder {
  static constexpr bool nibbles = false, shuffled = false;
  struct Scale { V zero, factor; };
  static inline Scale scale(float s, float z) { return {set1(Bias + z), set1(s)}; }
  static inline V numbers(const uint8_t* p, const Scale& scale) { return mul(sub(Widen::codes(p), scale.zero), scale.factor); }
};

#if defined(__AVX512F__)
inline __m128i bytes_at(const uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
struct WidenUnsigned { static inline V codes(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes_at(p))); } };
struct WidenSigned { static inline V codes(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_at(p))); } };
struct WidenFp8 {
  static inline V codes(const uint8_t* p) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepi8_epi32(bytes_at(p)), 20);
    return mul(_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(kFp8Bits))), set1(kFp8Factor));
  }
};
// Two words of eight codes at once: lanes take them in turns, so numbers come in another order, which x is packed in too.
template <const float* Values> struct NibbleDecoder {
  static constexpr bool nibbles = true, shuffled = true;
  struct Scale { V table; };
  static inline Scale scale(float s, float z) { return {mul(sub(load(Values), set1(z)), set1(s))}; }
  static inline V numbers(const uint8_t* p, const Scale& scale) {
    int64_t words; std::memcpy(&words, p, 8);
    const __m512i shifts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(words), shifts), scale.table);   // low 4 bits choose
  }
};
inline V lanes_in_turns(V v) { return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), v); }
inline V lanes_in_order(V v) { return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), v); }

// int16 rows times int8 weights, exactly.
typedef __m512i Sums;
constexpr int kIntegerStep = 32;
inline Sums no_sums() { return _mm512_setzero_si512(); }
inline __m512i integers_at(const int16_t* p) { return _mm512_loadu_si512(p); }
inline __m512i integers_at(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline Sums add_products(Sums sums, __m512i x, __m512i w) { return _mm512_add_epi32(sums, _mm512_madd_epi16(x, w)); }
inline int32_t total(Sums sums) { return _mm512_reduce_add_epi32(sums); }
#elif defined(__AVX2__)
inline __m128i bytes_at(const uint8_t* p) { return _mm_loadl_epi64((const __m128i*)p); }
struct WidenUnsigned { static inline V codes(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes_at(p))); } };
struct WidenSigned { static inline V codes(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes_at(p))); } };
struct WidenFp8 {
  static inline V codes(const uint8_t* p) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepi8_epi32(bytes_at(p)), 20);
    return mul(_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(kFp8Bits))), set1(kFp8Factor));
  }
};
template <const float* Values> struct NibbleDecoder {
  static constexpr bool nibbles = true, shuffled = false;
  struct Scale { V low, high; };
  static inline V numbers_of(const float* values, float s, float z) { return mul(sub(load(values), set1(z)), set1(s)); }
  static inline Scale scale(float s, float z) { return {numbers_of(Values, s, z), numbers_of(Values + 8, s, z)}; }
  static inline V numbers(const uint8_t* p, const Scale& scale) {
    int32_t word; std::memcpy(&word, p, 4);
    __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    V low = _mm256_permutevar8x32_ps(scale.low, index), high = _mm256_permutevar8x32_ps(scale.high, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));   // bit 3 chooses
  }
};
inline V lanes_in_turns(V v) { return v; }
inline V lanes_in_order(V v) { return v; }

typedef __m256i Sums;
constexpr int kIntegerStep = 16;
inline Sums no_sums() { return _mm256_setzero_si256(); }
inline __m256i integers_at(const int16_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256i integers_at(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline Sums add_products(Sums sums, __m256i x, __m256i w) { return _mm256_add_epi32(sums, _mm256_madd_epi16(x, w)); }
inline int32_t total(Sums sums) {
  int32_t lanes[8], sum = 0; _mm256_storeu_si256((__m256i*)lanes, sums);
  for (int32_t lane : lanes) sum += lane;
  return sum;
}
#else
struct WidenUnsigned { static inline V codes(const uint8_t* p) { return V{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; } };
struct WidenSigned {
  static inline V codes(const uint8_t* p) { return V{float(int8_t(p[0])), float(int8_t(p[1])), float(int8_t(p[2])), float(int8_t(p[3]))}; }
};
struct WidenFp8 {
  static inline float number(uint8_t code) { return bits_to_float((uint32_t(int32_t(int8_t(code))) << 20) & uint32_t(kFp8Bits)) * kFp8Factor; }
  static inline V codes(const uint8_t* p) { return V{number(p[0]), number(p[1]), number(p[2]), number(p[3])}; }
};
template <const float* Values> struct NibbleDecoder {
  static constexpr bool nibbles = true, shuffled = false;
  struct Scale { float table[16]; };
  static inline Scale scale(float s, float z) {
    Scale made;
    for (int i = 0; i < 16; i++) made.table[i] = (Values[i] - z) * s;
    return made;
  }
  static inline V numbers(const uint8_t* p, const Scale& scale) {
    return V{scale.table[p[0] & 15], scale.table[p[0] >> 4], scale.table[p[1] & 15], scale.table[p[1] >> 4]};
  }
};
inline V lanes_in_turns(V v) { return v; }
inline V lanes_in_order(V v) { return v; }

typedef int32_t Sums;
constexpr int kIntegerStep = 1;
inline Sums no_sums() { return 0; }
inline int32_t integers_at(const int16_t* p) { return *p; }
inline int32_t integers_at(const int8_t* p) { return *p; }
inline Sums add_products(Sums sums, int32_t x, int32_t w) { return sums + x * w; }
inline int32_t total(Sums sums) { return sums; }
#endif

typedef ByteDecoder<WidenUnsigned, 128> UnsignedDecoder;
typedef ByteDecoder<WidenSigned, 0> SignedDecoder;
typedef ByteDecoder<WidenFp8, 0> Fp8Decoder;
typedef NibbleDecoder<kNibbleValues> IntegerNibbleDecoder;
typedef NibbleDecoder<kFp4Values> Fp4Decoder;

}  // namespace
}  // namespace dayzero
