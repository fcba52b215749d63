// y_i[rows, out_i] = x[rows, in] · W_iᵀ with int8 weights and float32 activations, for XLA's CPU backend.
//
// Weights come in blocks of 32 outputs: values [blocks, in, 32] int8 and scales [blocks, ceil(in / 32), 32] float32, so
// that a block is one stream of memory and every lane of a vector is an output of its own. For each row and output the
// order of operations is fixed: products of a group of 32 inputs are summed one after the other, each sum times its
// scale is added to the result. A row's result therefore does not depend on how many rows there are, on the threads,
// or on the width of the vectors; only the portable path, where the processor lacks a fused multiply-add, rounds more.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = 32;  // outputs
constexpr int64_t kGroup = 32;  // inputs that share a scale
constexpr int kRows = 10;  // at most, at a time
constexpr int64_t kAhead = 2048;  // bytes to prefetch ahead
// Under so many multiplications a second thread costs more than it saves.
constexpr int64_t kWorthAThread = 1 << 17;

// One block of outputs for `ROWS` rows: sums[row][output].
using Tile = void (*)(const float* x, int64_t in, const int8_t* values, const float* scales, float (*sums)[kBlock]);

template <int ROWS>
void TilePortable(const float* x, int64_t in, const int8_t* values, const float* scales, float (*sums)[kBlock]) {
  const auto multiply_add = [](float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
  };
  std::memset(sums, 0, ROWS * sizeof(*sums));
  for (int64_t begin = 0; begin < in; begin += kGroup, scales += kBlock, values += kGroup * kBlock) {
    float group[ROWS][kBlock] = {};
    for (int64_t k = 0; k < kGroup; ++k) {
      const int8_t* at = values + k / 4 * 4 * kBlock + k % 4;
      for (int row = 0; row < ROWS; ++row) {
        for (int64_t o = 0; o < kBlock; ++o) {
          group[row][o] = multiply_add(static_cast<float>(at[4 * o]), x[row * in + begin + k], group[row][o]);
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
__attribute__((target("avx2,fma"))) void TileAvx2(const float* x, int64_t in, const int8_t* values,
                                                  const float* scales, float (*sums)[kBlock]) {
  // Two vectors of outputs at a time for four rows: sixteen registers hold no more.
  constexpr int kPart = ROWS < 4 ? ROWS : 4;
  static_assert(ROWS % kPart == 0);
  std::memset(sums, 0, ROWS * sizeof(*sums));
  for (int64_t begin = 0; begin < in; begin += kGroup, scales += kBlock, values += kGroup * kBlock) {
    for (int64_t o = 0; o < kBlock; o += 16) {
      for (int part = 0; part < ROWS; part += kPart) {
        __m256 group[kPart][2];
        for (int row = 0; row < kPart; ++row) group[row][0] = group[row][1] = _mm256_setzero_ps();
        for (int64_t k = 0; k < kGroup; k += 4) {
          const int8_t* at = values + k * kBlock + 4 * o;
          _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
          const __m256i bytes0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
          const __m256i bytes1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 32));
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const __m256 w0 = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes0, 24 - 8 * j), 24));
            const __m256 w1 = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes1, 24 - 8 * j), 24));
            for (int row = 0; row < kPart; ++row) {
              const __m256 factor = _mm256_broadcast_ss(x + (part + row) * in + begin + k + j);
              group[row][0] = _mm256_fmadd_ps(w0, factor, group[row][0]);
              group[row][1] = _mm256_fmadd_ps(w1, factor, group[row][1]);
            }
          }
        }
        const __m256 scale0 = _mm256_loadu_ps(scales + o), scale1 = _mm256_loadu_ps(scales + o + 8);
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
__attribute__((target("avx512f"))) void TileAvx512(const float* x, int64_t in, const int8_t* values,
                                                   const float* scales, float (*sums)[kBlock]) {
  __m512 sum[ROWS][2];
  for (int row = 0; row < ROWS; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
  for (int64_t begin = 0; begin < in; begin += kGroup, scales += kBlock) {
    __m512 group[ROWS][2];
    for (int row = 0; row < ROWS; ++row) group[row][0] = group[row][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < kGroup; k += 4, values += 4 * kBlock) {
      _mm_prefetch(reinterpret_cast<const char*>(values + kAhead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(values + kAhead + 64), _MM_HINT_T0);
      const __m512i bytes0 = _mm512_loadu_si512(values), bytes1 = _mm512_loadu_si512(values + 64);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512 w0 = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes0, 24 - 8 * j), 24));
        const __m512 w1 = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bytes1, 24 - 8 * j), 24));
        for (int row = 0; row < ROWS; ++row) {
          const __m512 factor = _mm512_set1_ps(x[row * in + begin + k + j]);
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

// AMX multiplies int8 by int8 exactly, so activations are written in fixed point: for each row and group of inputs
// 24 bits relative to the group's largest magnitude, which is no less than float32 holds of that one, in three digits
// of base 256 from -128 to 127. A tile of activations holds the digits of up to `kAmxRows` rows.
constexpr int64_t kDigits = 3, kAmxRows = 5;

#define DSPARK_AMX __attribute__((target("avx512f,avx512bw,amx-tile,amx-int8")))

struct Digits {
  int64_t groups, tiles;
  std::vector<int8_t> digits;  // [tiles, groups, kAmxRows · kDigits, kGroup]
  std::vector<float> scales;   // [tiles, kAmxRows, groups]

  int8_t* tile(int64_t tile, int64_t group) {
    return digits.data() + (tile * groups + group) * kAmxRows * kDigits * kGroup;
  }
  float* row_scales(int64_t row) { return scales.data() + row * groups; }

  DSPARK_AMX void Fill(const float* x, int64_t rows, int64_t in) {
    constexpr float kLargest = 0x7F7F00;  // with room for rounding
    groups = in / kGroup;
    tiles = (rows + kAmxRows - 1) / kAmxRows;
    if (tiles > 1) tiles += tiles % 2;  // they are multiplied in pairs
    digits.resize(tiles * groups * kAmxRows * kDigits * kGroup);
    scales.resize(tiles * kAmxRows * groups);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t group = 0; group < groups; ++group, x += kGroup) {
        const __m512 parts[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
        const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(parts[0]), _mm512_abs_ps(parts[1])));
        // Zero, or NaN where an activation is not finite, which must not be lost.
        const __m512 zero = _mm512_setzero_ps();
        const float finite = _mm512_reduce_add_ps(_mm512_fmadd_ps(parts[0], zero, _mm512_mul_ps(parts[1], zero)));
        const float scale = largest / kLargest + finite;
        row_scales(row)[group] = scale;
        const __m512 inverse = _mm512_set1_ps(scale > 1e-37f ? 1 / scale : 0);
        int8_t* to = tile(row / kAmxRows, group) + row % kAmxRows * kDigits * kGroup;
        for (int half = 0; half < 2; ++half) {
          __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(parts[half], inverse));
          for (int digit = 0; digit < kDigits; ++digit) {
            const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + digit * kGroup + half * 16), _mm512_cvtepi32_epi8(low));
            rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 8);
          }
        }
      }
    }
  }
};

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 hold sums (of two tiles of activations and two halves of a block), 4 and 5 activations, 6 and 7 weights.
DSPARK_AMX void Configure(int64_t first_rows, int64_t second_rows) {
  TileConfig config;
  const uint8_t counts[2] = {static_cast<uint8_t>(first_rows * kDigits), static_cast<uint8_t>(second_rows * kDigits)};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = tile < 4 ? counts[tile / 2] : tile < 6 ? counts[tile - 4] : kGroup / 4;
    config.bytes_per_row[tile] = tile == 4 || tile == 5 ? kGroup : 64;
    if (config.rows[tile] == 0) config.bytes_per_row[tile] = 0;
  }
  // GCC's intrinsic tells the compiler of the first eight bytes only.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Adds one group's sums of `rows` rows, in digits, to sums[row].
DSPARK_AMX inline void AddDigits(const int32_t (*digits)[16], int64_t rows, const float* row_scales, int64_t groups,
                                 __m512 scale, float (*sums)[kBlock]) {
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t (*at)[16] = digits + row * kDigits;
    __m512 value = _mm512_cvtepi32_ps(_mm512_load_si512(at[2]));
    value = _mm512_fmadd_ps(value, _mm512_set1_ps(256), _mm512_cvtepi32_ps(_mm512_load_si512(at[1])));
    value = _mm512_fmadd_ps(value, _mm512_set1_ps(256), _mm512_cvtepi32_ps(_mm512_load_si512(at[0])));
    const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(row_scales[row * groups]));
    _mm512_store_ps(sums[row], _mm512_fmadd_ps(value, both, _mm512_load_ps(sums[row])));
  }
}

// One block of outputs for the rows of the tiles of activations `first` and, where `second_rows` is not 0, the next.
DSPARK_AMX void TileAmx(Digits& x, int64_t first, int64_t first_rows, int64_t second_rows, const int8_t* values,
                        const float* scales, float (*sums)[kBlock]) {
  alignas(64) int32_t digits[4][kAmxRows * kDigits][16];
  std::memset(sums, 0, 2 * kAmxRows * sizeof(*sums));
  for (int64_t group = 0; group < x.groups; ++group, values += kGroup * kBlock, scales += kBlock) {
    for (int64_t line = 0; line < kGroup * kBlock; line += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(values + kAhead + line), _MM_HINT_T0);
    }
    _tile_loadd(4, x.tile(first, group), kGroup);
    _tile_loadd(6, values, 4 * kBlock);
    _tile_loadd(7, values + 64, 4 * kBlock);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(0, digits[0], 64);
    _tile_stored(1, digits[1], 64);
    if (second_rows) {
      _tile_loadd(5, x.tile(first + 1, group), kGroup);
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
      _tile_stored(2, digits[2], 64);
      _tile_stored(3, digits[3], 64);
    }
    const float* row_scales = x.row_scales(first * kAmxRows) + group;
    for (int half = 0; half < 2; ++half) {
      const __m512 scale = _mm512_loadu_ps(scales + 16 * half);
      auto* to = reinterpret_cast<float (*)[kBlock]>(sums[0] + 16 * half);
      AddDigits(digits[half], first_rows, row_scales, x.groups, scale, to);
      AddDigits(digits[2 + half], second_rows, row_scales + kAmxRows * x.groups, x.groups, scale, to + kAmxRows);
    }
  }
}

DSPARK_AMX void ReleaseTiles() { _tile_release(); }

// Asks the kernel to let this process use AMX's registers.
bool AmxAllowed() {
#if defined(__linux__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const bool amx = (edx >> 24 & 1) && (edx >> 25 & 1);
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return amx && __builtin_cpu_supports("avx512bw") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif

// Tiles for 1, 2, 4 and 8 rows.
using Tiles = std::array<Tile, 4>;

const Tiles kPaths[] = {
    {TilePortable<1>, TilePortable<2>, TilePortable<4>, TilePortable<8>},
#if defined(__x86_64__)
    {TileAvx2<1>, TileAvx2<2>, TileAvx2<4>, TileAvx2<8>},
    {TileAvx512<1>, TileAvx512<2>, TileAvx512<4>, TileAvx512<8>},
#endif
};
constexpr int64_t kAmx = 3;

struct Product {
  const int8_t* values;
  const float* scales;
  float* y;
  int64_t out;
  int64_t blocks;
};

// What the threads of one call share. A thread that comes late finds all blocks taken and touches nothing else.
struct Call {
  int64_t path;
  const float* x;
  int64_t rows, in;
  std::vector<Product> products;
  int64_t blocks = 0, workers = 1;
  // Worker w begins with the blocks from `begin(w)`, so that it reads one stream, and then helps the others.
  std::unique_ptr<std::atomic<int64_t>[]> next;
  std::atomic<int64_t> done{0};
#if defined(__x86_64__)
  Digits digits;
#endif

  int64_t begin(int64_t worker) const { return blocks * worker / workers; }

  void Work(int64_t first) {
    bool ready = path != kAmx;
    for (int64_t i = 0; i < workers; ++i) {
      const int64_t worker = (first + i) % workers;
      const int64_t end = begin(worker + 1);
      int64_t block;
      while ((block = next[worker].fetch_add(1, std::memory_order_relaxed)) < end) {
#if defined(__x86_64__)
        if (!ready) Configure(std::min(rows, kAmxRows), std::clamp<int64_t>(rows - kAmxRows, 0, kAmxRows));
#endif
        ready = true;
        Block(block);
        done.fetch_add(1, std::memory_order_release);
      }
    }
#if defined(__x86_64__)
    if (path == kAmx && ready) ReleaseTiles();
#endif
  }

  void Block(int64_t block) {
    const Product* product = products.data();
    for (; block >= product->blocks; ++product) block -= product->blocks;
    const int8_t* values = product->values + block * in * kBlock;
    const float* scales = product->scales + block * (in / kGroup) * kBlock;
    const int64_t width = std::min(kBlock, product->out - block * kBlock);
    float* y = product->y + block * kBlock;
    alignas(64) float sums[kRows][kBlock];
    for (int64_t row = 0; row < rows;) {
      int64_t count = 8;
#if defined(__x86_64__)
      if (path == kAmx) {
        // Rows that fill up the last tiles are multiplied too.
        count = std::min<int64_t>(rows - row, 2 * kAmxRows);
        const int64_t second = std::clamp<int64_t>(rows - kAmxRows, 0, kAmxRows);
        TileAmx(digits, row / kAmxRows, std::min(rows, kAmxRows), second, values, scales, sums);
      }
#endif
      if (path != kAmx) {
        int size = 3;
        for (; count > rows - row; count /= 2) --size;
        kPaths[path][size](x + row * in, in, values, scales, sums);
      }
      for (int64_t i = 0; i < count; ++i, ++row) {
        std::memcpy(y + row * product->out, sums[i], width * sizeof(float));
      }
    }
  }
};

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

// The fastest path of this processor: 0 portable, 1 AVX2, 2 AVX-512, 3 AMX.
extern "C" int64_t int8_products_best_path() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return AmxAllowed() ? kAmx : 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

static ffi::Error Int8Products(ffi::ThreadPool pool, int64_t path, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                               ffi::RemainingRets results) {
  static const int64_t best = int8_products_best_path();
  if (path > best) return ffi::Error::InvalidArgument("int8_products: this processor lacks the path asked for");
  auto call = std::make_shared<Call>();
  call->path = path < 0 ? best : path;
  call->x = x.typed_data();
  call->rows = x.dimensions()[0];
  call->in = x.dimensions()[1];
  for (size_t i = 0; i < results.size(); ++i) {
    auto values = weights.get<ffi::Buffer<ffi::S8>>(2 * i);
    auto scales = weights.get<ffi::Buffer<ffi::F32>>(2 * i + 1);
    auto y = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!values.has_value() || !scales.has_value() || !y.has_value()) {
      return ffi::Error::InvalidArgument("int8_products: weights are int8 values and float32 scales in turn");
    }
    const int64_t blocks = values->dimensions()[0];
    call->products.push_back(
        {values->typed_data(), scales->typed_data(), (*y)->typed_data(), (*y)->dimensions()[1], blocks});
    call->blocks += blocks;
  }
#if defined(__x86_64__)
  if (call->path == kAmx) call->digits.Fill(call->x, call->rows, call->in);
#endif
  const int64_t work = call->rows * call->in * call->blocks * kBlock;
  call->workers = std::max<int64_t>(1, std::min<int64_t>({pool.num_threads(), call->blocks, work / kWorthAThread}));
  call->next = std::make_unique<std::atomic<int64_t>[]>(call->workers);
  for (int64_t worker = 0; worker < call->workers; ++worker) call->next[worker] = call->begin(worker);
  for (int64_t worker = 1; worker < call->workers; ++worker) {
    pool.Schedule([call, worker] { call->Work(worker); });
  }
  call->Work(0);
  // Every block is taken by now: only those that other threads are at remain.
  for (int spins = 0; call->done.load(std::memory_order_acquire) < call->blocks; ++spins) {
    if (spins < 4096) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(int8_products, Int8Products,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Attr<int64_t>("path")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
