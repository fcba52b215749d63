// y_i[rows, out_i] = x[rows, in] · W_iᵀ with int8 weights and float32 activations, for XLA's CPU backend.
//
// Weights come in blocks of 32 outputs: values [blocks, groups, 8, 32, 4] int8 and scales [blocks, groups, 32] float32,
// so that a block is one stream of memory. A group is 32 inputs, four of which lie side by side for each output, as the
// processor's matrix unit (AMX) reads them; the last group is padded with zeros. For each row and output the order of
// operations is fixed: the products of a group are summed, and each sum times its scale is added to the result. A row's
// result therefore does not depend on how many rows there are or on the threads. It does not depend on the width of
// vectors either; only the portable path, where the processor lacks a fused multiply-add, rounds more, and AMX, which
// sums integers exactly, less.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__) && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define WITH_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kBlock = 32;     // outputs
constexpr int64_t kGroup = 32;     // inputs that share a scale
constexpr int64_t kQuad = 4;       // inputs side by side
constexpr int kRows = 8;           // rows at a time: their sums fill the registers of AVX-512
constexpr int64_t kAhead = 4096;   // bytes to prefetch ahead
// Under so many multiplications a second thread costs more than it saves.
constexpr int64_t kWorthAThread = 1 << 17;
constexpr int64_t kMostWorkers = 64;

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

#if defined(WITH_AMX)

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

#endif

// Tiles for 1, 2, 4 and 8 rows.
using Tiles = std::array<Tile, 4>;

enum Path : int64_t { kPortable, kAvx2, kAvx512, kAmx };

const Tiles kPaths[] = {
    {TilePortable<1>, TilePortable<2>, TilePortable<4>, TilePortable<8>},
#if defined(__x86_64__)
    {TileAvx2<1>, TileAvx2<2>, TileAvx2<4>, TileAvx2<8>},
    {TileAvx512<1>, TileAvx512<2>, TileAvx512<4>, TileAvx512<8>},
#endif
};

struct Product {
  const int8_t* values;
  const float* scales;
  float* y;
  int64_t out;
  int64_t blocks;
};

// The number of rows that a tile for `rows` rows has: 2^size of them.
int SizeOver(int64_t rows) {
  int size = 0;
  while ((int64_t{1} << size) < rows && size < 3) ++size;
  return size;
}

// What the threads of one call share. A thread that comes late finds all blocks taken and touches nothing else.
struct Call {
  Path path;
  const float* x;  // [rows, 32 · groups]
  int64_t rows, groups;
  std::vector<Product> products;
  int64_t blocks, workers;
  std::vector<float> padded;
#if defined(WITH_AMX)
  std::vector<DigitGroup> digits;  // of each eight rows, all groups
#endif
  // Worker w begins with the blocks from `begin(w)`, so that it reads one stream, and then helps the others.
  std::array<std::atomic<int64_t>, kMostWorkers> next;
  std::atomic<int64_t> done{0};

  int64_t begin(int64_t worker) const { return blocks * worker / workers; }

  void Work(int64_t first) {
    int configured = -1;
    for (int64_t i = 0; i < workers; ++i) {
      const int64_t worker = (first + i) % workers;
      const int64_t end = begin(worker + 1);
      int64_t block;
      while ((block = next[worker].fetch_add(1, std::memory_order_relaxed)) < end) {
        Block(block, configured);
        done.fetch_add(1, std::memory_order_release);
      }
    }
    Release(configured);
  }

#if defined(WITH_AMX)
  __attribute__((target("amx-tile"))) static void Release(int configured) {
    if (configured >= 0) _tile_release();
  }

  // Rows that no whole tile is left for are padded: that costs the matrix unit less than another pass.
  void BlockAmx(int64_t row, const int8_t* values, const float* scales, float (*sums)[kBlock], int& configured) const {
    static constexpr decltype(&TileAmx<1>) kTiles[] = {TileAmx<1>, TileAmx<2>, TileAmx<4>, TileAmx<8>};
    const int size = SizeOver(rows - row);
    if (configured != size) ConfigureTiles(1 << size);
    configured = size;
    kTiles[size](digits.data() + row / kRows * groups, groups, values, scales, sums);
  }
#else
  static void Release(int) {}
#endif

  void Block(int64_t block, int& configured) const {
    const Product* product = products.data();
    for (; block >= product->blocks; ++product) block -= product->blocks;
    const int8_t* values = product->values + block * groups * kGroup * kBlock;
    const float* scales = product->scales + block * groups * kBlock;
    const int64_t width = std::min(kBlock, product->out - block * kBlock);
    alignas(64) float sums[kRows][kBlock];
    for (int64_t row = 0; row < rows;) {
      int64_t count;
#if defined(WITH_AMX)
      if (path == kAmx) {
        BlockAmx(row, values, scales, sums, configured);
        count = std::min<int64_t>(kRows, rows - row);
      } else
#endif
      {
        int size = SizeOver(rows - row);
        if ((int64_t{1} << size) > rows - row) --size;
        kPaths[path][size](x + row * groups * kGroup, groups, values, scales, sums);
        count = int64_t{1} << size;
      }
      for (int64_t i = 0; i < count; ++i, ++row) {
        std::memcpy(product->y + row * product->out + block * kBlock, sums[i], width * sizeof(float));
      }
    }
  }
};

// Calls whose memory waits for the next one: to ask the system for it anew takes as long as a small product.
class Calls {
 public:
  std::shared_ptr<Call> Take() {
    std::unique_ptr<Call> call;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        call = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!call) call = std::make_unique<Call>();
    call->products.clear();
    call->blocks = 0;
    call->done.store(0, std::memory_order_relaxed);
    return std::shared_ptr<Call>(call.release(), [this](Call* used) {
      std::lock_guard<std::mutex> lock(mutex_);
      idle_.emplace_back(used);
    });
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Call>> idle_;
};

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

// The best path of this processor: 0 portable, 1 AVX2, 2 AVX-512, 3 AMX.
extern "C" int64_t int8_products_best_path() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) {
#if defined(WITH_AMX)
    if (HasAmx()) return kAmx;
#endif
    return kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kPortable;
}

static ffi::Error Int8Products(ffi::ThreadPool pool, int64_t path, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                               ffi::RemainingRets results) {
  static const int64_t best = int8_products_best_path();
  if (path > best) return ffi::Error::InvalidArgument("int8_products: this processor lacks the path asked for");
  // Never destroyed: a late thread may still hand a call back.
  static Calls* const calls = new Calls;
  const std::shared_ptr<Call> call = calls->Take();
  call->path = static_cast<Path>(path < 0 ? best : path);
  call->x = x.typed_data();
  call->rows = x.dimensions()[0];
  const int64_t in = x.dimensions()[1];
  call->groups = (in + kGroup - 1) / kGroup;
  if (in % kGroup) {
    call->padded.assign(call->rows * call->groups * kGroup, 0.0f);
    for (int64_t row = 0; row < call->rows; ++row) {
      std::copy_n(call->x + row * in, in, call->padded.data() + row * call->groups * kGroup);
    }
    call->x = call->padded.data();
  }
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
#if defined(WITH_AMX)
  if (call->path == kAmx) {
    const size_t size = (call->rows + kRows - 1) / kRows * call->groups;
    if (call->digits.size() < size) call->digits.resize(size);
    for (int64_t row = 0; row < call->rows; row += kRows) {
      const int count = static_cast<int>(std::min<int64_t>(kRows, call->rows - row));
      WriteDigits(call->x + row * call->groups * kGroup, call->groups, count, 1 << SizeOver(count),
                  call->digits.data() + row / kRows * call->groups);
    }
  }
#endif
  const int64_t work = call->rows * in * call->blocks * kBlock;
  call->workers = std::max<int64_t>(
      1, std::min<int64_t>({pool.num_threads(), call->blocks, work / kWorthAThread, kMostWorkers}));
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
