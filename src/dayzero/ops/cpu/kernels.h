// What one instruction set provides: a table of plain functions over raw pointers. In: rows, weights, key and value row
// pointers. Out: written through pointers. No torch here, no allocation, no threads: operators.cpp does those.
// Legend: M rows, N output columns, K reduced dimension, G query heads per key head, Dk/Dv head dimensions.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dayzero {

enum class DType : int { f32, bf16, f16 };
struct bf16 { uint16_t bits; };
struct half { uint16_t bits; };

// Keys are attended in partitions that start at multiples of this absolute position, so a result depends on the sequence
// alone: never on threads or neighbours. 512 keys of scores for 4 heads are 8 KiB: they stay in the first-level cache.
constexpr int kPartitionKeys = 512;
// Columns are handed to threads in units of this many: the rows of one AMX tile.
constexpr int kColumnUnit = 16;

struct LinearCall {          // out[M,N] = x[M,K] @ w[N,K]^T + bias[N]; strides in elements, last dimension dense
  const void* x; int64_t x_stride; DType x_type;        // out has x's type
  const void* w; int64_t w_stride; DType w_type;
  const void* bias; DType bias_type;                    // bias may be null
  void* out; int64_t out_stride;
  int64_t M, N, K;
};

struct AttendCall {          // one query token, one key head, keys of one partition -> unnormalised partial result
  const float* q; int64_t G, Dk, Dv;                    // q [G, Dk]
  const void* const* k_rows; const void* const* v_rows; // num_keys pointers, plus 3 repeats of the last
  int64_t num_keys; DType type;
  float scale, softcap;
  float* maximum; float* sum; float* acc;               // [G], [G], [G, Dv]
};

struct SoftmaxRow {          // scores[0:n] in place -> probabilities; keys outside [low, high) get 0
  float* scores; int64_t n, low, high;
  float scale, softcap;
  bool has_sink; float sink;
};

struct NormRow {             // out = x * rsqrt(mean(x^2) + eps) * (weight_offset + weight)
  const void* x; void* out; DType type;
  const void* weight; DType weight_type;                // may be null
  int64_t n; float eps, weight_offset;
};

struct RangeRow {            // least and greatest of every `width` columns; NaN where one is not finite
  const void* x; DType type; int64_t columns, width;
  float* low; float* high;                              // [ceil(columns / width)]
};

struct CodesRow {            // codes = clamp(round(x / scale + zero)), one scale for every `width` columns
  const void* x; DType type; int64_t columns, width;
  const float* scales; const int8_t* zeros;             // zeros may be null
  float least, greatest;
  int8_t* codes;                                        // [columns]
  double* sums;                                         // += squares of error, weight, decoded; product; max of |error|
};

// How a weight's codes are kept: bytes of code + 128, int8, 4 bits of code + 8, E4M3, E2M1 (4-bit codes: the low half first).
enum class CodeType : int { unsigned8, signed8, nibble, fp8, fp4 };
enum class ScaleType : int { f32, bf16, f16, exponent };
enum class Activations : int { none, int8, fp8 };       // what rows are rounded to before they are multiplied

struct QuantizedWeight {     // [N, K]: one scale for block_rows x block_columns codes (0 columns: the whole row)
  const uint8_t* codes; int64_t code_stride; CodeType code;   // bytes
  const void* scales; int64_t scale_stride; ScaleType scale_type;
  const int8_t* zeros;                                  // as many as scales, or null
  int64_t block_rows, block_columns;                    // columns: a multiple of 32
};

struct QuantizedCall {       // as LinearCall, whose w is not used
  LinearCall linear;
  QuantizedWeight w;
  Activations activations; float input_scale;           // 0: each row has a scale of its own
};

struct KernelTable {
  const char* isa;
  bool hardware_bf16;                                   // whether a library bf16 matmul is worth calling here
  size_t (*linear_pack_bytes)(const LinearCall&);       // 0: x is used where it lies
  void (*linear_pack)(const LinearCall&, void* packed);
  void (*linear_columns)(const LinearCall&, const void* packed, int64_t column_begin, int64_t column_end);
  void (*attend)(const AttendCall&);
  void (*softmax_row)(const SoftmaxRow&);
  void (*norm_row)(const NormRow&);
  void (*to_f32)(const void* source, DType type, float* out, int64_t n);
  void (*from_f32)(const float* source, void* out, DType type, int64_t n);
  void (*range_row)(const RangeRow&);
  void (*codes_row)(const CodesRow&);
  void (*pack_row)(const int8_t* codes, int64_t n, int bits, uint32_t* words);   // 4 or 8 bits, as value + 2^(bits - 1)
  bool (*sums_integers)(const QuantizedCall&);          // whether rows are summed exactly, in integers
  size_t (*quantized_pack_bytes)(const QuantizedCall&);
  void (*quantized_pack)(const QuantizedCall&, void* packed);
  // `buffer`: room for the numbers of so many columns, as floats, K rounded up to 32.
  void (*quantized_columns)(const QuantizedCall&, const void* packed, void* buffer, int64_t columns, int64_t column_begin, int64_t column_end);
  void (*quantized_rows)(const QuantizedWeight&, int64_t K, int64_t begin, int64_t end, float* buffer, void* out, DType type);
  float (*activation_row)(const QuantizedCall&, int64_t row, float* out);   // codes as floats; returns their scale
  void (*finish_integers)(const QuantizedCall&, const int32_t* sums, int64_t sum_stride, const float* row_scales, int64_t row, int64_t rows,
                          int64_t column, int64_t columns);
};

}  // namespace dayzero

// One per compiled instruction set. Weak: a compiler that is too old for one simply leaves it out.
extern "C" {
const dayzero::KernelTable* dayzero_kernels_generic();
__attribute__((weak)) const dayzero::KernelTable* dayzero_kernels_avx2();
__attribute__((weak)) const dayzero::KernelTable* dayzero_kernels_avx512();
__attribute__((weak)) const dayzero::KernelTable* dayzero_kernels_avx512_bf16();
__attribute__((weak)) const dayzero::KernelTable* dayzero_kernels_amx_bf16();
}
