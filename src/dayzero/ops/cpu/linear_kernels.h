// Rows times weights, for few rows: weights are streamed once, each (row, column) has one accumulator vector that walks K
// in order, so a row's result does not depend on how many rows there are or on which thread computes its column.
#pragma once
#include "vectors.h"

namespace dayzero {
namespace {

constexpr int kChunk = 64;      // columns per pass over the rows: 64 x 1536 bf16 weights are 192 KiB, inside a level-2 cache
constexpr int kRowBlock = 16;   // rows per pass: 16 x 1536 float rows are 96 KiB

// Multiply-add in float: x was widened by linear_pack, weights are widened as they are loaded.
template <class T> struct WidenedDot {
  typedef float X; typedef T Weight;
  static constexpr int step = W;
  static inline V loaded(const X* p) { return load(p); }
  static inline V loaded(const X* p, int64_t n) { return load(p, n); }
  template <class U = T> static inline V weights(const U* p) { return load(p); }
  template <class U = T> static inline V weights(const U* p, int64_t n) { return load(p, n); }
  static inline V mad(V a, V x, V w) { return fma(x, w, a); }
};

#if defined(__AVX512BF16__)
// Pairs of bf16 products per lane, accumulated in float by the instruction itself.
struct PairDot {
  typedef bf16 X; typedef bf16 Weight;
  static constexpr int step = 32;
  static inline __m512i loaded(const X* p) { return _mm512_loadu_si512(p); }
  static inline __m512i loaded(const X* p, int64_t n) { return _mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), p); }
  static inline __m512i weights(const X* p) { return loaded(p); }
  static inline __m512i weights(const X* p, int64_t n) { return loaded(p, n); }
  static inline V mad(V a, __m512i x, __m512i w) { return _mm512_dpbf16_ps(a, (__m512bh)x, (__m512bh)w); }
};
#endif

template <class D, int R, int C>
inline void block(const typename D::X* x, int64_t x_stride, const typename D::Weight* w, int64_t w_stride, int64_t K, float* tile) {
  constexpr int per_line = 64 / int(sizeof(typename D::Weight)), unroll = per_line > D::step ? per_line / D::step : 1;
  V acc[R * C];
  for (int i = 0; i < R * C; i++) acc[i] = zero();
  int64_t k = 0;
  for (; k + unroll * D::step <= K; k += unroll * D::step) {
    for (int c = 0; c < C; c++) __builtin_prefetch(w + (c + C) * w_stride + k);   // the next C columns, same place
#pragma GCC unroll 4
    for (int u = 0; u < unroll; u++) {
      decltype(D::weights(w)) wv[C];
      for (int c = 0; c < C; c++) wv[c] = D::weights(w + c * w_stride + k + u * D::step);
      for (int r = 0; r < R; r++) {
        auto xv = D::loaded(x + r * x_stride + k + u * D::step);
        for (int c = 0; c < C; c++) acc[r * C + c] = D::mad(acc[r * C + c], xv, wv[c]);
      }
    }
  }
  while (k < K) {
    int64_t n = K - k < D::step ? K - k : D::step;
    decltype(D::weights(w)) wv[C];
    for (int c = 0; c < C; c++) wv[c] = n == D::step ? D::weights(w + c * w_stride + k) : D::weights(w + c * w_stride + k, n);
    for (int r = 0; r < R; r++) {
      auto xv = n == D::step ? D::loaded(x + r * x_stride + k) : D::loaded(x + r * x_stride + k, n);
      for (int c = 0; c < C; c++) acc[r * C + c] = D::mad(acc[r * C + c], xv, wv[c]);
    }
    k += n;
  }
  float sums[(R * C + 3) / 4 * 4];
  for (int i = 0; i < R * C; i += 4)
    reduce4(acc[i], i + 1 < R * C ? acc[i + 1] : zero(), i + 2 < R * C ? acc[i + 2] : zero(), i + 3 < R * C ? acc[i + 3] : zero(), sums + i);
  for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) tile[r * kChunk + c] = sums[r * C + c];
}

// All rows of a block against C columns. Accumulators must fit the registers: 32 of them, or 16 without AVX-512.
template <class D, int C>
inline void column_group(const typename D::X* x, int64_t x_stride, const typename D::Weight* w, int64_t w_stride, int64_t K, int64_t rows, float* tile) {
  constexpr int Wide = (W == 16 || C == 1) ? C : C / 2;        // columns at a time with 3 or 4 rows
  int64_t r = 0;
  for (; r + 3 <= rows; ) {
    int64_t take = rows - r >= 4 ? 4 : 3;
    for (int c = 0; c < C; c += Wide) {
      if (take == 4) block<D, 4, Wide>(x + r * x_stride, x_stride, w + c * w_stride, w_stride, K, tile + r * kChunk + c);
      else block<D, 3, Wide>(x + r * x_stride, x_stride, w + c * w_stride, w_stride, K, tile + r * kChunk + c);
    }
    r += take;
  }
  if (rows - r == 2) block<D, 2, C>(x + r * x_stride, x_stride, w, w_stride, K, tile + r * kChunk);
  if (rows - r == 1) block<D, 1, C>(x + r * x_stride, x_stride, w, w_stride, K, tile + r * kChunk);
}

// Adds the bias and writes a tile of sums in the output's type.
inline void finish(const LinearCall& call, float* tile, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  float bias[kChunk];
  if (call.bias) to_f32((const char*)call.bias + column * size_of(call.bias_type), call.bias_type, bias, columns);
  for (int64_t r = 0; r < rows; r++) {
    float* sums = tile + r * kChunk;
    if (call.bias) for (int64_t c = 0; c < columns; c++) sums[c] += bias[c];
    from_f32(sums, (char*)call.out + ((row + r) * call.out_stride + column) * size_of(call.x_type), call.x_type, columns);
  }
}

template <class D>
void columns(const LinearCall& call, const typename D::X* x, int64_t x_stride, int64_t begin, int64_t end) {
  auto w = (const typename D::Weight*)call.w;
  alignas(64) float tile[kRowBlock * kChunk];
  for (int64_t n = begin; n < end; n += kChunk) {
    int64_t width = end - n < kChunk ? end - n : kChunk;
    for (int64_t m = 0; m < call.M; m += kRowBlock) {
      int64_t rows = call.M - m < kRowBlock ? call.M - m : kRowBlock, c = 0;
      for (; c + 4 <= width; c += 4) column_group<D, 4>(x + m * x_stride, x_stride, w + (n + c) * call.w_stride, call.w_stride, call.K, rows, tile + c);
      for (; c < width; c++) column_group<D, 1>(x + m * x_stride, x_stride, w + (n + c) * call.w_stride, call.w_stride, call.K, rows, tile + c);
      finish(call, tile, m, rows, n, width);
    }
  }
}

inline int64_t packed_stride(const LinearCall& call) { return (call.K + 15) / 16 * 16; }   // floats; rows start on a cache line
inline bool both_bf16(const LinearCall& call) { return call.x_type == DType::bf16 && call.w_type == DType::bf16; }

size_t linear_pack_bytes(const LinearCall& call) {
#if defined(__AVX512BF16__)
  if (both_bf16(call)) return 0;
#endif
  return call.x_type == DType::f32 ? 0 : call.M * packed_stride(call) * sizeof(float);
}

void linear_pack(const LinearCall& call, void* packed) {
  for (int64_t m = 0; m < call.M; m++)
    to_f32((const char*)call.x + m * call.x_stride * size_of(call.x_type), call.x_type, (float*)packed + m * packed_stride(call), call.K);
}

void linear_columns(const LinearCall& call, const void* packed, int64_t begin, int64_t end) {
#if defined(__AVX512BF16__)
  if (both_bf16(call)) return columns<PairDot>(call, (const bf16*)call.x, call.x_stride, begin, end);
#endif
  auto x = (const float*)(packed ? packed : call.x);
  int64_t x_stride = packed ? packed_stride(call) : call.x_stride;
  if (call.w_type == DType::f32) columns<WidenedDot<float>>(call, x, x_stride, begin, end);
  else if (call.w_type == DType::bf16) columns<WidenedDot<bf16>>(call, x, x_stride, begin, end);
  else columns<WidenedDot<half>>(call, x, x_stride, begin, end);
}

}  // namespace
}  // namespace dayzero
