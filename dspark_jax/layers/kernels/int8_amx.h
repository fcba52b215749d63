// One block of outputs by the processor's matrix unit (AMX), where the compiler and the system have it: WITH_AMX.

#pragma once

#include "int8_vectors.h"

#if defined(__x86_64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define WITH_AMX 1

#include <algorithm>
#include <limits>

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// The matrix unit multiplies int8 by int8. A group of a row's inputs is written as 23-bit integers times a power of two,
// each in three digits of eight bits: what the float32 numbers lose lies 2⁻²³ below the group's largest.
constexpr int kDigits = 3;
// So many rows have room for all of their digits in one tile of 16.
constexpr int kWholeTile = 4;

// `kRows` rows of x as digits: for each group the first two digits of all rows, then the third, 32 bytes each, and the
// powers of two.
struct alignas(64) DigitGroup {
  int8_t digits[kDigits][kRows][kGroup];
  float scales[kRows];
};

__attribute__((target("avx512f,avx512bw"))) void WriteDigits(const float* x, int64_t groups, int rows, int tile_rows,
                                                             DigitGroup* to) {
  for (int64_t g = 0; g < groups; ++g, ++to) {
    int8_t(*digits)[kGroup] = to->digits[0];
    for (int row = 0; row < tile_rows; ++row) {
      int8_t* place[kDigits] = {digits[row], digits[tile_rows + row], digits[2 * tile_rows + row]};
      if (row >= rows) {
        for (int8_t* digit : place) std::memset(digit, 0, kGroup);
        to->scales[row] = 0;
        continue;
      }
      const float* from = x + (row * groups + g) * kGroup;
      const __m512 x0 = _mm512_loadu_ps(from), x1 = _mm512_loadu_ps(from + 16);
      const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
      const int largest = _mm512_reduce_max_epi32(
          _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x0), magnitude),
                           _mm512_and_si512(_mm512_castps_si512(x1), magnitude)));
      // 2^(exponent - 127) is over the largest; where that is not a number, no result is one.
      const bool finite = largest < 0x7f800000;
      const int exponent = std::max((largest >> 23) + 1, 40);
      const auto power = [](int biased) {
        const int bits = biased << 23;
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
      };
      // Digits hold x · 2^(22 - (exponent - 127)).
      const __m512 up = _mm512_set1_ps(finite ? power(276 - exponent) : 0.0f);
      to->scales[row] = finite ? power(exponent - 22) : std::numeric_limits<float>::quiet_NaN();
      const __m512i low = _mm512_set1_epi32(1 << 7), middle = _mm512_set1_epi32(1 << 15);
      for (int half = 0; half < 2; ++half) {
        const __m512 scaled = finite ? _mm512_mul_ps(half ? x1 : x0, up) : _mm512_setzero_ps();
        const __m512i q = _mm512_cvtps_epi32(scaled);
        // q = 2^16 · first + 2^8 · second + third, the last two in [-128, 128).
        const __m512i first = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_add_epi32(middle, low)), 16);
        const __m512i second = _mm512_srai_epi32(_mm512_add_epi32(q, low), 8);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(place[0] + 16 * half), _mm512_cvtepi32_epi8(first));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(place[1] + 16 * half), _mm512_cvtepi32_epi8(second));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(place[2] + 16 * half), _mm512_cvtepi32_epi8(q));
      }
    }
  }
}

// Tiles: 0 and 1 the digits, 2 and 3 weights of 16 outputs each, 4 to 7 sums.
__attribute__((target("amx-tile"))) void ConfigureTiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const auto shape = [&config](int tile, int rows, int bytes) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.bytes[tile] = static_cast<uint16_t>(bytes);
  };
  const int first = rows > kWholeTile ? 2 * rows : kDigits * rows;
  shape(0, first, kGroup);
  for (int tile : {2, 3}) shape(tile, kGroup / kQuad, 64);
  for (int tile : {4, 6}) shape(tile, first, 64);
  if (rows > kWholeTile) {
    shape(1, rows, kGroup);
    for (int tile : {5, 7}) shape(tile, rows, 64);
  }
  // Some compilers' intrinsic does not say that it reads all of it.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Tiles are not renamed, so that what is written to one waits for all that was read from it before. The two halves of a
// block's outputs have tiles of their own: one is multiplied while the other's sums, ready by then, are stored.
template <int ROWS>
constexpr bool kTwoTiles = ROWS > kWholeTile;

template <int ROWS, int HALF>
__attribute__((target("amx-tile,amx-int8"), always_inline)) inline void MultiplyHalf(const int8_t* values) {
  const int8_t* own = values + 64 * HALF;
  for (int64_t line = 0; line < kGroup * kBlock / 2; line += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(values + kAhead + HALF * kGroup * kBlock / 2 + line), _MM_HINT_T0);
  }
  if constexpr (HALF == 0) {
    _tile_zero(4);
    if constexpr (kTwoTiles<ROWS>) _tile_zero(5);
    _tile_loadd(2, own, kBlock * kQuad);
    _tile_dpbssd(4, 0, 2);
    if constexpr (kTwoTiles<ROWS>) _tile_dpbssd(5, 1, 2);
  } else {
    _tile_zero(6);
    if constexpr (kTwoTiles<ROWS>) _tile_zero(7);
    _tile_loadd(3, own, kBlock * kQuad);
    _tile_dpbssd(6, 0, 3);
    if constexpr (kTwoTiles<ROWS>) _tile_dpbssd(7, 1, 3);
  }
}

template <int ROWS, int HALF>
__attribute__((target("amx-tile"), always_inline)) inline void StoreHalf(int32_t (*to)[16]) {
  if constexpr (HALF == 0) {
    _tile_stored(4, to, 64);
    if constexpr (kTwoTiles<ROWS>) _tile_stored(5, to + 2 * ROWS, 64);
  } else {
    _tile_stored(6, to, 64);
    if constexpr (kTwoTiles<ROWS>) _tile_stored(7, to + 2 * ROWS, 64);
  }
}

// Adds the integers of a group, times its scales, to the sums of 16 outputs.
template <int ROWS>
__attribute__((target("avx512f"), always_inline)) inline void ScaleHalf(const int32_t (*integers)[16],
                                                                        const float* scales, const float* row_scales,
                                                                        __m512* sum) {
  const __m512 scale = _mm512_loadu_ps(scales), digit = _mm512_set1_ps(256.0f);
  for (int row = 0; row < ROWS; ++row) {
    const __m512i first = _mm512_load_si512(integers[row]);
    const __m512i second = _mm512_load_si512(integers[ROWS + row]);
    const __m512i third = _mm512_load_si512(integers[2 * ROWS + row]);
    // The first two together fit 27 bits.
    const __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(first, 8), second));
    const __m512 total = _mm512_fmadd_ps(high, digit, _mm512_cvtepi32_ps(third));
    sum[row] = _mm512_fmadd_ps(total, _mm512_mul_ps(scale, _mm512_set1_ps(row_scales[row])), sum[row]);
  }
}

template <int ROWS>
__attribute__((target("avx512f,amx-tile,amx-int8"))) void TileAmx(const DigitGroup* x, int64_t groups,
                                                                  const int8_t* values, const float* scales,
                                                                  float (*sums)[kBlock]) {
  alignas(64) int32_t integers[2][2][kDigits * ROWS][16];
  __m512 sum[2][ROWS];
  for (int row = 0; row < ROWS; ++row) sum[0][row] = sum[1][row] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, values += kGroup * kBlock) {
    const auto now = integers[g % 2], before = integers[(g + 1) % 2];
    _tile_loadd(0, x[g].digits, kGroup);
    if constexpr (kTwoTiles<ROWS>) {
      _tile_loadd(1, reinterpret_cast<const int8_t*>(x[g].digits) + 2 * ROWS * kGroup, kGroup);
    }
    MultiplyHalf<ROWS, 0>(values);
    if (g) {
      StoreHalf<ROWS, 1>(before[1]);
      ScaleHalf<ROWS>(before[0], scales + (g - 1) * kBlock, x[g - 1].scales, sum[0]);
    }
    MultiplyHalf<ROWS, 1>(values);
    StoreHalf<ROWS, 0>(now[0]);
    if (g) ScaleHalf<ROWS>(before[1], scales + (g - 1) * kBlock + 16, x[g - 1].scales, sum[1]);
  }
  const auto last = integers[(groups + 1) % 2];
  StoreHalf<ROWS, 1>(last[1]);
  for (int half = 0; half < 2; ++half) {
    ScaleHalf<ROWS>(last[half], scales + (groups - 1) * kBlock + 16 * half, x[groups - 1].scales, sum[half]);
    for (int row = 0; row < ROWS; ++row) _mm512_storeu_ps(sums[row] + 16 * half, sum[half][row]);
  }
}

bool HasAmx() {
  unsigned a, b, c, d;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kInt8)) != (kTile | kInt8)) return false;
  // Linux gives a process the tiles' registers on request (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

}  // namespace

#endif
