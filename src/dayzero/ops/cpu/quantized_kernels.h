// Rows times weights that are kept in few bits. Codes become numbers of the type that the machine multiplies (bfloat16 where
// it has instructions for that and the rows are of that type, else float32), either in registers, or, with more rows, written
// down for some columns, over which the plain kernel goes: the same numbers in the same order, so the same bits. Each (row,
// column) has one accumulator that walks K in order. Integer rows times integer weights are summed exactly, in any order.
#pragma once
#include "linear_kernels.h"
#include "quantized_decoders.h"

namespace dayzero {
namespace {

constexpr int kBlockK = 32;          // rows are copied in whole blocks, zeros at the end; no block has two scales
// Up to so many rows codes are decoded in registers, again for every few rows: as many as the registers have accumulators for.
constexpr int kRowsAtOnce = W == 16 ? 4 : 2, kRegisterRows = 4;

inline int64_t rounded_up(int64_t n, int64_t block) { return (n + block - 1) / block * block; }
template <class D> inline int64_t bytes_before(int64_t k) { return D::nibbles ? k / 2 : k; }
template <class D> inline int64_t bytes_of(int64_t codes) { return D::nibbles ? (codes + 1) / 2 : codes; }

inline bool is_shuffled(CodeType code) { return IntegerNibbleDecoder::shuffled && (code == CodeType::nibble || code == CodeType::fp4); }
inline bool multiplies_bf16(const QuantizedCall& call) {
#if defined(__AVX512BF16__)
  return call.linear.x_type == DType::bf16;
#else
  return false;
#endif
}
inline bool sums_integers(const QuantizedCall& call) {
  return call.activations == Activations::int8 && call.w.code == CodeType::signed8 && !call.w.zeros && !call.w.block_columns;
}

inline float scale_at(const QuantizedWeight& w, int64_t index) {
  if (w.scale_type == ScaleType::f32) return ((const float*)w.scales)[index];
  if (w.scale_type == ScaleType::bf16) return widen(((const bf16*)w.scales)[index]);
  if (w.scale_type == ScaleType::f16) return widen(((const half*)w.scales)[index]);
  uint32_t exponent = ((const uint8_t*)w.scales)[index];                  // 2^(e - 127); the least is a subnormal
  return bits_to_float(exponent ? exponent << 23 : 1u << 22);
}

// Where a column's scales begin. A division: once for each column, not for each group.
inline int64_t first_scale(const QuantizedWeight& w, int64_t n) { return (w.block_rows == 1 ? n : n / w.block_rows) * w.scale_stride; }

template <class D> inline typename D::Scale scale_of(const QuantizedWeight& w, int64_t index) {
  return D::scale(scale_at(w, index), w.zeros ? float(w.zeros[index]) : 0.0f);
}

// Calls `whole(begin, end, group)` for the whole blocks of a group, and `partial(begin, count, group)` for a last, shorter one.
template <class Whole, class Partial> inline void walk(const QuantizedWeight& w, int64_t K, const Whole& whole, const Partial& partial) {
  int64_t width = w.block_columns ? w.block_columns : rounded_up(K, kBlockK);
  for (int64_t group = 0, begin = 0; begin < K; group++, begin += width) {
    int64_t end = begin + width < K ? begin + width : K, left = (end - begin) % kBlockK;
    whole(begin, end - left, group);
    if (left) partial(end - left, left, group);
  }
}

// What a block of 32 numbers is multiplied with, and how.
struct InFloat {
  typedef float X;
  template <class D> struct Numbers { V part[kBlockK / W]; };
  template <class D> static inline Numbers<D> numbers(const uint8_t* p, const typename D::Scale& scale) {
    Numbers<D> made;
    for (int i = 0; i < kBlockK / W; i++) made.part[i] = D::numbers(p + bytes_before<D>(i * W), scale);
    return made;
  }
  template <class N> static inline V mad(V acc, const float* x, const N& numbers) {
    for (int i = 0; i < kBlockK / W; i++) acc = fma(load(x + i * W), numbers.part[i], acc);
    return acc;
  }
  template <class N> static inline void put(float* out, const N& numbers) { for (int i = 0; i < kBlockK / W; i++) store(out + i * W, numbers.part[i]); }
};

#if defined(__AVX512BF16__)
struct InPairs {                     // pairs of bf16 products, as PairDot
  typedef bf16 X;
  template <class D> struct Numbers { __m512i all; };
  template <class D> static inline Numbers<D> numbers(const uint8_t* p, const typename D::Scale& scale) {
    return {(__m512i)_mm512_cvtne2ps_pbh(D::numbers(p + bytes_before<D>(16), scale), D::numbers(p, scale))};
  }
  template <class N> static inline V mad(V acc, const bf16* x, const N& numbers) { return PairDot::mad(acc, PairDot::loaded(x), numbers.all); }
  template <class N> static inline void put(bf16* out, const N& numbers) { _mm512_storeu_si512(out, numbers.all); }
};
#endif

template <class D, class M, int R, int C>
inline void quantized_block(const QuantizedWeight& w, const typename M::X* x, int64_t x_stride, int64_t n, int64_t K, float* tile) {
  V acc[R * C];
  for (int i = 0; i < R * C; i++) acc[i] = zero();
  const uint8_t* codes[C];
  int64_t first[C], ahead = C * w.code_stride;
  for (int c = 0; c < C; c++) { codes[c] = w.codes + (n + c) * w.code_stride; first[c] = first_scale(w, n + c); }
  walk(w, K, [&](int64_t begin, int64_t end, int64_t group) __attribute__((always_inline)) {
    typename D::Scale scales[C];
    for (int c = 0; c < C; c++) scales[c] = scale_of<D>(w, first[c] + group);
    for (int64_t k = begin; k < end; k += kBlockK) {
      if (bytes_before<D>(k) % 64 == 0) for (int c = 0; c < C; c++) __builtin_prefetch(codes[c] + bytes_before<D>(k) + ahead);   // the next columns
      for (int c = 0; c < C; c++) {
        auto numbers = M::template numbers<D>(codes[c] + bytes_before<D>(k), scales[c]);
        for (int r = 0; r < R; r++) acc[r * C + c] = M::mad(acc[r * C + c], x + r * x_stride + k, numbers);
      }
    }
  }, [&](int64_t k, int64_t count, int64_t group) __attribute__((always_inline)) {
    for (int c = 0; c < C; c++) {
      uint8_t copy[kBlockK] = {};
      std::memcpy(copy, codes[c] + bytes_before<D>(k), bytes_of<D>(count));
      auto numbers = M::template numbers<D>(copy, scale_of<D>(w, first[c] + group));
      for (int r = 0; r < R; r++) acc[r * C + c] = M::mad(acc[r * C + c], x + r * x_stride + k, numbers);
    }
  });
  float sums[(R * C + 3) / 4 * 4];
  for (int i = 0; i < R * C; i += 4)
    reduce4(acc[i], i + 1 < R * C ? acc[i + 1] : zero(), i + 2 < R * C ? acc[i + 2] : zero(), i + 3 < R * C ? acc[i + 3] : zero(), sums + i);
  for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) tile[r * kChunk + c] = sums[r * C + c];
}

template <class D, class M> void register_columns(const QuantizedCall& call, const typename M::X* x, int64_t begin, int64_t end) {
  int64_t K = call.linear.K, stride = rounded_up(K, kBlockK), rows = call.linear.M;
  alignas(64) float tile[kRegisterRows * kChunk];
  for (int64_t n = begin; n < end; n += kChunk) {
    int64_t width = end - n < kChunk ? end - n : kChunk;
    for (int64_t c = 0; c < width; ) {
      bool four = c + 4 <= width;
      for (int64_t r = 0; r < rows; ) {
        int64_t take = rows - r >= kRowsAtOnce ? kRowsAtOnce : rows - r >= 2 ? 2 : 1;
        float* to = tile + r * kChunk + c;
        const typename M::X* from = x + r * stride;
        if (take == 4 && four) quantized_block<D, M, kRowsAtOnce, 4>(call.w, from, stride, n + c, K, to);
        else if (take == 4) quantized_block<D, M, kRowsAtOnce, 1>(call.w, from, stride, n + c, K, to);
        else if (take == 2 && four) quantized_block<D, M, 2, 4>(call.w, from, stride, n + c, K, to);
        else if (take == 2) quantized_block<D, M, 2, 1>(call.w, from, stride, n + c, K, to);
        else if (four) quantized_block<D, M, 1, 4>(call.w, from, stride, n + c, K, to);
        else quantized_block<D, M, 1, 1>(call.w, from, stride, n + c, K, to);
        r += take;
      }
      c += four ? 4 : 1;
    }
    finish(call.linear, tile, 0, rows, n, width);
  }
}

// The numbers of one column in the decoder's order, in whole blocks; what lies behind the last is whatever zero codes mean.
template <class D, class M> inline void decode_column(const QuantizedWeight& w, int64_t n, int64_t K, typename M::X* out) {
  const uint8_t* codes = w.codes + n * w.code_stride;
  int64_t first = first_scale(w, n);
  walk(w, K, [&](int64_t begin, int64_t end, int64_t group) {
    auto scale = scale_of<D>(w, first + group);
    for (int64_t k = begin; k < end; k += kBlockK) M::put(out + k, M::template numbers<D>(codes + bytes_before<D>(k), scale));
  }, [&](int64_t k, int64_t count, int64_t group) {
    uint8_t copy[kBlockK] = {};
    std::memcpy(copy, codes + bytes_before<D>(k), bytes_of<D>(count));
    M::put(out + k, M::template numbers<D>(copy, scale_of<D>(w, first + group)));
  });
}

template <class M> void decode_columns(const QuantizedWeight& w, int64_t begin, int64_t end, int64_t K, typename M::X* out) {
  int64_t stride = rounded_up(K, kBlockK);
  for (int64_t n = begin; n < end; n++, out += stride) switch (w.code) {
    case CodeType::unsigned8: decode_column<UnsignedDecoder, M>(w, n, K, out); break;
    case CodeType::signed8: decode_column<SignedDecoder, M>(w, n, K, out); break;
    case CodeType::nibble: decode_column<IntegerNibbleDecoder, M>(w, n, K, out); break;
    case CodeType::fp8: decode_column<Fp8Decoder, M>(w, n, K, out); break;
    case CodeType::fp4: decode_column<Fp4Decoder, M>(w, n, K, out); break;
  }
}

template <class M> void register_columns_of(const QuantizedCall& call, const typename M::X* x, int64_t begin, int64_t end) {
  switch (call.w.code) {
    case CodeType::unsigned8: return register_columns<UnsignedDecoder, M>(call, x, begin, end);
    case CodeType::signed8: return register_columns<SignedDecoder, M>(call, x, begin, end);
    case CodeType::nibble: return register_columns<IntegerNibbleDecoder, M>(call, x, begin, end);
    case CodeType::fp8: return register_columns<Fp8Decoder, M>(call, x, begin, end);
    case CodeType::fp4: return register_columns<Fp4Decoder, M>(call, x, begin, end);
  }
}

// The call of the plain kernel for columns that are written down: over whole blocks of K.
inline LinearCall plain_call(const QuantizedCall& call, const void* x) {
  LinearCall plain = call.linear;
  plain.x = x; plain.K = plain.x_stride = plain.w_stride = rounded_up(call.linear.K, kBlockK);
  plain.w_type = multiplies_bf16(call) ? DType::bf16 : DType::f32;
  return plain;
}
#if defined(__AMX_BF16__)
size_t (*const plain_pack_bytes)(const LinearCall&) = amx_pack_bytes;
void (*const plain_pack)(const LinearCall&, void*) = amx_pack;
void (*const plain_columns)(const LinearCall&, const void*, int64_t, int64_t) = amx_columns;
#else
size_t (*const plain_pack_bytes)(const LinearCall&) = linear_pack_bytes;
void (*const plain_pack)(const LinearCall&, void*) = linear_pack;
void (*const plain_columns)(const LinearCall&, const void*, int64_t, int64_t) = linear_columns;
#endif

// Tiles sum in an order of their own, so they serve any number of rows or none.
inline bool in_registers(const QuantizedCall& call) {
#if defined(__AMX_BF16__)
  if (multiplies_bf16(call)) return false;
#endif
  return call.linear.M <= kRegisterRows;
}

// ((sum as float) * the column's scale) * the row's, plus bias. `sums` [rows, sum_stride] are of columns from `column` on.
void finish_integers(const QuantizedCall& call, const int32_t* sums, int64_t sum_stride, const float* row_scales, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  alignas(64) float tile[kChunk], scales[kChunk];
  for (int64_t c = 0; c < columns; c += kChunk) {
    int64_t width = columns - c < kChunk ? columns - c : kChunk;
    for (int64_t i = 0; i < width; i++) scales[i] = scale_at(call.w, first_scale(call.w, column + c + i));
    for (int64_t r = row; r < row + rows; r++) {
      const int32_t* line = sums + (r - row) * sum_stride + c;
      for (int64_t i = 0; i < width; i++) tile[i] = float(line[i]) * scales[i];
      for (int64_t i = 0; i < width; i++) tile[i] *= row_scales[r];
      finish(call.linear, tile, r, 1, column + c, width);
    }
  }
}

template <int R, int C>
inline void integer_block(const QuantizedWeight& w, const int16_t* x, int64_t x_stride, int64_t n, int64_t K, int32_t* sums, int64_t sum_stride) {
  Sums acc[R * C];
  for (int i = 0; i < R * C; i++) acc[i] = no_sums();
  int64_t whole = K / kBlockK * kBlockK;
  auto multiply = [&](const int8_t* const* at, int64_t k) __attribute__((always_inline)) {
    for (int part = 0; part < kBlockK; part += kIntegerStep) {
      decltype(integers_at(at[0])) wv[C];
      for (int c = 0; c < C; c++) wv[c] = integers_at(at[c] + part);
      for (int r = 0; r < R; r++) {
        auto xv = integers_at(x + r * x_stride + k + part);
        for (int c = 0; c < C; c++) acc[r * C + c] = add_products(acc[r * C + c], xv, wv[c]);
      }
    }
  };
  const int8_t* at[C];
  for (int64_t k = 0; k < whole; k += kBlockK) {
    for (int c = 0; c < C; c++) at[c] = (const int8_t*)w.codes + (n + c) * w.code_stride + k;
    if (k % 64 == 0) for (int c = 0; c < C; c++) __builtin_prefetch(at[c] + C * w.code_stride);
    multiply(at, k);
  }
  if (whole < K) {
    int8_t copies[C][kBlockK] = {};
    for (int c = 0; c < C; c++) {
      std::memcpy(copies[c], w.codes + (n + c) * w.code_stride + whole, K - whole);
      at[c] = copies[c];
    }
    multiply(at, whole);
  }
  for (int r = 0; r < R; r++) for (int c = 0; c < C; c++) sums[r * sum_stride + c] = total(acc[r * C + c]);
}

void integer_columns(const QuantizedCall& call, const int16_t* x, const float* row_scales, int64_t begin, int64_t end) {
  const LinearCall& linear = call.linear;
  int64_t stride = rounded_up(linear.K, kBlockK);
  int32_t sums[2 * kChunk];
  for (int64_t n = begin; n < end; n += kChunk) {
    int64_t width = end - n < kChunk ? end - n : kChunk;
    for (int64_t m = 0; m < linear.M; m += 2) {
      int64_t rows = linear.M - m < 2 ? 1 : 2, c = 0;
      for (; c + 4 <= width; c += 4) {
        if (rows == 2) integer_block<2, 4>(call.w, x + m * stride, stride, n + c, linear.K, sums + c, kChunk);
        else integer_block<1, 4>(call.w, x + m * stride, stride, n + c, linear.K, sums + c, kChunk);
      }
      for (; c < width; c++) {
        if (rows == 2) integer_block<2, 1>(call.w, x + m * stride, stride, n + c, linear.K, sums + c, kChunk);
        else integer_block<1, 1>(call.w, x + m * stride, stride, n + c, linear.K, sums + c, kChunk);
      }
      finish_integers(call, sums, kChunk, row_scales, m, rows, n, width);
    }
  }
}

// A row as the codes that the preset means it to have, in float32, and their scale: 255 steps between the extremes of its
// largest magnitude for int8, 448 for E4M3 (as the compressed-tensors library scales a token), or a scale that was given.
float activation_row(const QuantizedCall& call, int64_t row, float* out) {
  int64_t K = call.linear.K;
  to_f32((const char*)call.linear.x + row * call.linear.x_stride * size_of(call.linear.x_type), call.linear.x_type, out, K);
  if (call.activations == Activations::none) return 1.0f;
  bool integers = call.activations == Activations::int8, measured = call.input_scale == 0.0f;
  float scale = call.input_scale;
  if (measured) {
    float most = 0.0f;
    for (int64_t k = 0; k < K; k++) { float size = out[k] < 0 ? -out[k] : out[k]; most = size > most ? size : most; }
    scale = most / (integers ? 127.5f : 448.0f);
    if (scale == 0.0f) scale = 1.1920929e-07f;                  // a row of zeros: any scale will do
  }
  if (integers) {
    V s = set1(scale), low = set1(-128.0f), high = set1(127.0f);
    for (int64_t k = 0; k < K; k += W) if (k + W <= K) store(out + k, divide(load(out + k), s)); else store(out + k, divide(load(out + k, K - k), s), K - k);
    // The largest magnitude lies on the border of two codes, where the last bit of the division would decide.
    if (measured) for (int64_t k = 0; k < K; k++) out[k] = out[k] < -127.49f ? -128.0f : out[k];
    for (int64_t k = 0; k < K; k += W) {
      if (k + W <= K) store(out + k, minimum(maximum(round(load(out + k)), low), high));
      else store(out + k, minimum(maximum(round(load(out + k, K - k)), low), high), K - k);
    }
    return scale;
  }
  for (int64_t k = 0; k < K; k++) {
    float v = out[k] / scale;
    v = v < -448.0f ? -448.0f : v > 448.0f ? 448.0f : v;
    float power = bits_to_float(float_to_bits(v) & 0x7f800000u);
    power = power < 0x1p-6f ? 0x1p-6f : power;
    float magic = power * 1572864.0f;                           // 1.5 * 2^20: adding it rounds to three bits of mantissa
    out[k] = (v + magic) - magic;
  }
  return scale;
}

// Layout of what is packed: the rows' scales; the rows, as int16 or in their own type, in the decoder's order; what the plain
// kernel packs; room for a row of floats.
struct Packing {
  size_t rows, plain, spare, end;
  Packing(const QuantizedCall& call) {
    int64_t M = call.linear.M, padded = rounded_up(call.linear.K, kBlockK);
    rows = rounded_up(M * 4, 64);
    plain = rows + rounded_up(M * padded * (sums_integers(call) ? 2 : size_of(call.linear.x_type)), 64);
    spare = plain + (sums_integers(call) ? 0 : rounded_up(plain_pack_bytes(plain_call(call, nullptr)), 64));
    end = spare + padded * 4;
  }
};

size_t quantized_pack_bytes(const QuantizedCall& call) { return Packing(call).end; }

void quantized_pack(const QuantizedCall& call, void* packed) {
  Packing at(call);
  int64_t M = call.linear.M, K = call.linear.K, padded = rounded_up(K, kBlockK);
  auto scales = (float*)packed, line = (float*)((char*)packed + at.spare);
  char* rows = (char*)packed + at.rows;
  bool integers = sums_integers(call), shuffled = is_shuffled(call.w.code);
  for (int64_t m = 0; m < M; m++) {
    scales[m] = activation_row(call, m, line);
    for (int64_t k = K; k < padded; k++) line[k] = 0;
    if (integers) {
      for (int64_t k = 0; k < padded; k++) ((int16_t*)rows)[m * padded + k] = int16_t(int32_t(line[k]));
      continue;
    }
    if (call.activations != Activations::none) for (int64_t k = 0; k < K; k++) line[k] *= scales[m];
    if (shuffled) for (int64_t k = 0; k < padded; k += W) store(line + k, lanes_in_turns(load(line + k)));
    from_f32(line, rows + m * padded * size_of(call.linear.x_type), call.linear.x_type, padded);
  }
  LinearCall plain = plain_call(call, rows);
  if (!integers && plain_pack_bytes(plain)) plain_pack(plain, (char*)packed + at.plain);
}

void quantized_columns(const QuantizedCall& call, const void* packed, void* buffer, int64_t columns, int64_t begin, int64_t end) {
  Packing at(call);
  const void* rows = (const char*)packed + at.rows;
  if (sums_integers(call)) return integer_columns(call, (const int16_t*)rows, (const float*)packed, begin, end);
  LinearCall plain = plain_call(call, rows);
  const void* plain_packed = plain_pack_bytes(plain) ? (const char*)packed + at.plain : nullptr;
  if (in_registers(call)) {
#if defined(__AVX512BF16__)
    if (multiplies_bf16(call)) return register_columns_of<InPairs>(call, (const bf16*)rows, begin, end);
#endif
    return register_columns_of<InFloat>(call, (const float*)(plain_packed ? plain_packed : rows), begin, end);
  }
  for (int64_t n = begin; n < end; n += columns) {
    int64_t width = end - n < columns ? end - n : columns;
#if defined(__AVX512BF16__)
    if (multiplies_bf16(call)) decode_columns<InPairs>(call.w, n, n + width, call.linear.K, (bf16*)buffer);
    else
#endif
    decode_columns<InFloat>(call.w, n, n + width, call.linear.K, (float*)buffer);
    plain.w = buffer; plain.N = width;
    plain.out = (char*)call.linear.out + n * size_of(call.linear.x_type);
    if (call.linear.bias) plain.bias = (const char*)call.linear.bias + n * size_of(call.linear.bias_type);
    plain_columns(plain, plain_packed, 0, width);
  }
}

// Rows of the weight as plain numbers of a type. `buffer`: K floats, in whole blocks.
void quantized_rows(const QuantizedWeight& w, int64_t K, int64_t begin, int64_t end, float* buffer, void* out, DType type) {
  for (int64_t n = begin; n < end; n++) {
    decode_columns<InFloat>(w, n, n + 1, K, buffer);
    if (is_shuffled(w.code)) for (int64_t k = 0; k < K; k += W) store(buffer + k, lanes_in_order(load(buffer + k)));
    char* to = (char*)out + (n - begin) * K * size_of(type);
    int64_t k = 0;
#if defined(__AVX512BF16__)
    if (type == DType::bf16) for (; k + 32 <= K; k += 32) _mm512_storeu_si512(to + 2 * k, (__m512i)_mm512_cvtne2ps_pbh(load(buffer + k + 16), load(buffer + k)));
#endif
    from_f32(buffer + k, to + k * size_of(type), type, K - k);
  }
}

}  // namespace
}  // namespace dayzero
