// One block of outputs by vectors: the layout and the order of operations that int8_products.cc describes.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 32;    // outputs
constexpr int64_t kGroup = 32;    // inputs that share a scale
constexpr int64_t kQuad = 4;      // inputs side by side
constexpr int kRows = 8;          // rows at a time: their sums fill the registers of AVX-512
constexpr int64_t kAhead = 4096;  // bytes to prefetch ahead

// One block of outputs for `ROWS` rows of x [rows, 32 · groups]: sums[row][output].
using Tile = void (*)(const float* x, int64_t groups, const int8_t* values, const float* scales,
                      float (*sums)[kBlock]);

template <int ROWS>
void TilePortable(const float* x, int64_t groups, const int8_t* values, const float* scales, float (*sums)[kBlock]) {
  const auto multiply_add = [](float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
  };
  std::memset(sums, 0, ROWS * sizeof(*sums));
  for (int64_t g = 0; g < groups; ++g, scales += kBlock) {
    float group[ROWS][kBlock] = {};
    for (int64_t quad = 0; quad < kGroup; quad += kQuad, values += kBlock * kQuad) {
      for (int64_t j = 0; j < kQuad; ++j) {
        for (int row = 0; row < ROWS; ++row) {
          const float factor = x[(row * groups + g) * kGroup + quad + j];
          for (int64_t o = 0; o < kBlock; ++o) {
            group[row][o] = multiply_add(static_cast<float>(values[o * kQuad + j]), factor, group[row][o]);
          }
        }
      }
    }
    for (int row = 0; row < ROWS; ++row) {
      for (int64_t o = 0; o < kBlock; ++o) sums[row][o] = multiply_add(scales[o], group[row][o], sums[row][o]);
    }
  }
}

#if defined(__x86_64__)

template <int ROWS>
__attribute__((target("avx2,fma"))) void TileAvx2(const float* x, int64_t groups, const int8_t* values,
                                                  const float* scales, float (*sums)[kBlock]) {
  // Two vectors of outputs at a time for four rows: sixteen registers hold no more.
  constexpr int kPart = ROWS < 4 ? ROWS : 4;
  static_assert(ROWS % kPart == 0);
  std::memset(sums, 0, ROWS * sizeof(*sums));
  for (int64_t g = 0; g < groups; ++g, scales += kBlock, values += kGroup * kBlock) {
    for (int64_t o = 0; o < kBlock; o += 16) {
      const __m256 scale0 = _mm256_loadu_ps(scales + o), scale1 = _mm256_loadu_ps(scales + o + 8);
      for (int part = 0; part < ROWS; part += kPart) {
        __m256 group[kPart][2];
        for (int row = 0; row < kPart; ++row) group[row][0] = group[row][1] = _mm256_setzero_ps();
        for (int64_t quad = 0; quad < kGroup; quad += kQuad) {
          const int8_t* at = values + quad * kBlock + o * kQuad;
          _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
          const __m256i bytes0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
          const __m256i bytes1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + 1);
          for (int64_t j = 0; j < kQuad; ++j) {
            const int left = 24 - 8 * static_cast<int>(j);
            const __m256 w0 = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes0, left), 24));
            const __m256 w1 = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes1, left), 24));
            for (int row = 0; row < kPart; ++row) {
              const __m256 factor = _mm256_broadcast_ss(x + ((part + row) * groups + g) * kGroup + quad + j);
              group[row][0] = _mm256_fmadd_ps(w0, factor, group[row][0]);
              group[row][1] = _mm256_fmadd_ps(w1, factor, group[row][1]);
            }
          }
        }
        for (int row = 0; row < kPart; ++row) {
          float* sum = sums[part + row] + o;
          _mm256_storeu_ps(sum, _mm256_fmadd_ps(scale0, group[row][0], _mm256_loadu_ps(sum)));
          _mm256_storeu_ps(sum + 8, _mm256_fmadd_ps(scale1, group[row][1], _mm256_loadu_ps(sum + 8)));
        }
      }
    }
  }
}

template <int ROWS>
__attribute__((target("avx512f"))) void TileAvx512(const float* x, int64_t groups, const int8_t* values,
                                                   const float* scales, float (*sums)[kBlock]) {
  __m512 sum[ROWS][2];
  for (int row = 0; row < ROWS; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, scales += kBlock) {
    __m512 group[ROWS][2];
    for (int row = 0; row < ROWS; ++row) group[row][0] = group[row][1] = _mm512_setzero_ps();
    for (int64_t quad = 0; quad < kGroup; quad += kQuad, values += kBlock * kQuad) {
      _mm_prefetch(reinterpret_cast<const char*>(values + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(values + kAhead + 64), _MM_HINT_T0);
      const __m512i bytes0 = _mm512_loadu_si512(values), bytes1 = _mm512_loadu_si512(values + 64);
      for (int64_t j = 0; j < kQuad; ++j) {
        const unsigned left = 24 - 8 * static_cast<unsigned>(j);
        const __m512 w0 = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes0, left), 24));
        const __m512 w1 = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes1, left), 24));
        for (int row = 0; row < ROWS; ++row) {
          const __m512 factor = _mm512_set1_ps(x[(row * groups + g) * kGroup + quad + j]);
          group[row][0] = _mm512_fmadd_ps(w0, factor, group[row][0]);
          group[row][1] = _mm512_fmadd_ps(w1, factor, group[row][1]);
        }
      }
    }
    const __m512 scale0 = _mm512_loadu_ps(scales), scale1 = _mm512_loadu_ps(scales + 16);
    for (int row = 0; row < ROWS; ++row) {
      sum[row][0] = _mm512_fmadd_ps(scale0, group[row][0], sum[row][0]);
      sum[row][1] = _mm512_fmadd_ps(scale1, group[row][1], sum[row][1]);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    _mm512_storeu_ps(sums[row], sum[row][0]);
    _mm512_storeu_ps(sums[row] + 16, sum[row][1]);
  }
}

#endif

}  // namespace
