// Compiled once per instruction set, with its flags and -DDAYZERO_ISA=<name>: exports that set's KernelTable.
#include "attention_kernels.h"
#include "linear_kernels.h"
#include "quantize_kernels.h"
#if defined(__AMX_BF16__)
#include "amx_kernels.h"
#endif
#include "quantized_kernels.h"

#define DAYZERO_JOIN(a, b) a##b
#define DAYZERO_EXPORT(name) DAYZERO_JOIN(dayzero_kernels_, name)
#define DAYZERO_TEXT(name) DAYZERO_QUOTE(name)
#define DAYZERO_QUOTE(name) #name

extern "C" const dayzero::KernelTable* DAYZERO_EXPORT(DAYZERO_ISA)() {
  using namespace dayzero;
  static const KernelTable table = {
    DAYZERO_TEXT(DAYZERO_ISA),
#if defined(__AMX_BF16__)
    true, amx_pack_bytes, amx_pack, amx_columns,
#elif defined(__AVX512BF16__)
    true, linear_pack_bytes, linear_pack, linear_columns,
#else
    false, linear_pack_bytes, linear_pack, linear_columns,
#endif
    attend, softmax_row, norm_row, to_f32, from_f32, range_row, codes_row, pack_row,
    sums_integers, quantized_pack_bytes, quantized_pack, quantized_columns, quantized_rows, activation_row, finish_integers};
  return &table;
}
