// XXH3, 64 bits, seed 0, default secret: the checksum of records, as the Python package xxhash computes it.
//
// Written from the public specification of xxHash. Inputs of up to 240 bytes are mixed in one go; longer ones go
// through eight 64-bit accumulators in stripes of 64 bytes, which are scrambled after every 16 stripes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../common/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records are little-endian: XXH3 is written here for such processors only"
#endif

namespace lohan {
namespace xxh3 {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu, kPrime64_3 = 0x165667B19E3779F9u,
                   kPrime64_4 = 0x85EBCA77C2B2AE63u, kPrime64_5 = 0x27D4EB2F165667C5u;
constexpr uint64_t kPrimeMix1 = 0x165667919E3779F9u, kPrimeMix2 = 0x9FB21C651E98DF25u;
constexpr size_t kStripeBytes = 64, kStripesPerBlock = 16, kBlockBytes = kStripeBytes * kStripesPerBlock;
constexpr size_t kLongest = 240;   // bytes that are mixed in one go

alignas(64) constexpr unsigned char kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

inline uint32_t read32(const unsigned char* from) {
    uint32_t value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline uint64_t read64(const unsigned char* from) {
    uint64_t value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline uint64_t rotate_left(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

// The two halves of the 128-bit product, one over the other.
inline uint64_t folded_product(uint64_t x, uint64_t y) {
    const unsigned __int128 product = static_cast<unsigned __int128>(x) * y;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * kPrimeMix1;
    return hash ^ hash >> 32;
}

inline uint64_t avalanche_of_xxh64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * kPrime64_2;
    hash = (hash ^ hash >> 29) * kPrime64_3;
    return hash ^ hash >> 32;
}

inline uint64_t mix16(const unsigned char* data, const unsigned char* secret) {
    return folded_product(read64(data) ^ read64(secret), read64(data + 8) ^ read64(secret + 8));
}

inline uint64_t of_0_to_16(const unsigned char* data, size_t nbytes) {
    if (nbytes > 8) {
        const uint64_t low = read64(data) ^ read64(kSecret + 24) ^ read64(kSecret + 32);
        const uint64_t high = read64(data + nbytes - 8) ^ read64(kSecret + 40) ^ read64(kSecret + 48);
        return avalanche(nbytes + __builtin_bswap64(low) + high + folded_product(low, high));
    }
    if (nbytes >= 4) {
        const uint64_t both = read32(data + nbytes - 4) + (static_cast<uint64_t>(read32(data)) << 32);
        uint64_t hash = both ^ read64(kSecret + 8) ^ read64(kSecret + 16);
        hash = (hash ^ rotate_left(hash, 49) ^ rotate_left(hash, 24)) * kPrimeMix2;
        hash = (hash ^ ((hash >> 35) + nbytes)) * kPrimeMix2;
        return hash ^ hash >> 28;
    }
    if (nbytes == 0) return avalanche_of_xxh64(read64(kSecret + 56) ^ read64(kSecret + 64));
    const uint32_t combined = static_cast<uint32_t>(data[0]) << 16 | static_cast<uint32_t>(data[nbytes / 2]) << 24 |
                              static_cast<uint32_t>(data[nbytes - 1]) | static_cast<uint32_t>(nbytes) << 8;
    return avalanche_of_xxh64(combined ^ static_cast<uint64_t>(read32(kSecret) ^ read32(kSecret + 4)));
}

inline uint64_t of_17_to_128(const unsigned char* data, size_t nbytes) {
    uint64_t hash = nbytes * kPrime64_1;
    for (size_t i = (nbytes - 1) / 32 + 1; i-- > 0;) {   // pairs from both ends, the inner ones first
        hash += mix16(data + 16 * i, kSecret + 32 * i);
        hash += mix16(data + nbytes - 16 * (i + 1), kSecret + 32 * i + 16);
    }
    return avalanche(hash);
}

inline uint64_t of_129_to_240(const unsigned char* data, size_t nbytes) {
    uint64_t hash = nbytes * kPrime64_1;
    for (size_t i = 0; i < 8; ++i) hash += mix16(data + 16 * i, kSecret + 16 * i);
    hash = avalanche(hash);
    for (size_t i = 8; i < nbytes / 16; ++i) hash += mix16(data + 16 * i, kSecret + 16 * (i - 8) + 3);
    return avalanche(hash + mix16(data + nbytes - 16, kSecret + 136 - 17));
}

// What a processor does with the accumulators: sums (8,) in memory between calls.
struct ScalarLanes {
    uint64_t sums[8];

    explicit ScalarLanes(const uint64_t* start) { std::memcpy(sums, start, sizeof(sums)); }
    void store(uint64_t* to) const { std::memcpy(to, sums, sizeof(sums)); }

    void take_stripe(const unsigned char* data, const unsigned char* secret) {
        for (int i = 0; i < 8; ++i) {
            const uint64_t value = read64(data + 8 * i), key = value ^ read64(secret + 8 * i);
            sums[i ^ 1] += value;
            sums[i] += (key & 0xffffffffu) * (key >> 32);
        }
    }

    void scramble(const unsigned char* secret) {
        for (int i = 0; i < 8; ++i) sums[i] = (sums[i] ^ sums[i] >> 47 ^ read64(secret + 8 * i)) * kPrime32_1;
    }
};

inline void take_long(uint64_t* sums, const unsigned char* data, size_t nbytes) {
    ScalarLanes lanes(sums);
    const size_t num_blocks = (nbytes - 1) / kBlockBytes;
    for (size_t block = 0; block < num_blocks; ++block, data += kBlockBytes) {
        for (size_t i = 0; i < kStripesPerBlock; ++i) lanes.take_stripe(data + kStripeBytes * i, kSecret + 8 * i);
        lanes.scramble(kSecret + sizeof(kSecret) - kStripeBytes);
    }
    nbytes -= num_blocks * kBlockBytes;
    for (size_t i = 0; i < (nbytes - 1) / kStripeBytes; ++i) {
        lanes.take_stripe(data + kStripeBytes * i, kSecret + 8 * i);
    }
    lanes.take_stripe(data + nbytes - kStripeBytes, kSecret + sizeof(kSecret) - kStripeBytes - 7);
    lanes.store(sums);
}

#if defined(__x86_64__)
#define LOHAN_TARGET_XXH3 __attribute__((target("avx2")))

LOHAN_TARGET_XXH3 LOHAN_INLINE __m256i load256(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

LOHAN_TARGET_XXH3 LOHAN_INLINE __m256i plus_stripe(__m256i sums, const unsigned char* data,
                                                   const unsigned char* secret) {
    const __m256i values = load256(data), keys = _mm256_xor_si256(values, load256(secret));
    const __m256i products = _mm256_mul_epu32(keys, _mm256_srli_epi64(keys, 32));
    const __m256i swapped = _mm256_shuffle_epi32(values, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sums, _mm256_add_epi64(products, swapped));
}

LOHAN_TARGET_XXH3 LOHAN_INLINE __m256i scrambled(__m256i sums, const unsigned char* secret) {
    const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32_1));
    const __m256i keys = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), load256(secret));
    const __m256i low = _mm256_mul_epu32(keys, prime);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(keys, 32), prime);
    return _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
}

LOHAN_TARGET_XXH3 inline void take_long_avx2(uint64_t* sums, const unsigned char* data, size_t nbytes) {
    __m256i low = load256(sums), high = load256(sums + 4);
    const size_t num_blocks = (nbytes - 1) / kBlockBytes;
    for (size_t block = 0; block < num_blocks; ++block, data += kBlockBytes) {
        for (size_t i = 0; i < kStripesPerBlock; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(data + kStripeBytes * i + 512), _MM_HINT_T0);
            low = plus_stripe(low, data + kStripeBytes * i, kSecret + 8 * i);
            high = plus_stripe(high, data + kStripeBytes * i + 32, kSecret + 8 * i + 32);
        }
        low = scrambled(low, kSecret + sizeof(kSecret) - kStripeBytes);
        high = scrambled(high, kSecret + sizeof(kSecret) - kStripeBytes + 32);
    }
    nbytes -= num_blocks * kBlockBytes;
    for (size_t i = 0; i < (nbytes - 1) / kStripeBytes; ++i) {
        low = plus_stripe(low, data + kStripeBytes * i, kSecret + 8 * i);
        high = plus_stripe(high, data + kStripeBytes * i + 32, kSecret + 8 * i + 32);
    }
    const unsigned char* last = kSecret + sizeof(kSecret) - kStripeBytes - 7;
    low = plus_stripe(low, data + nbytes - kStripeBytes, last);
    high = plus_stripe(high, data + nbytes - 32, last + 32);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + 4), high);
}
#endif

inline uint64_t of_long(const unsigned char* data, size_t nbytes, Isa isa) {
    uint64_t sums[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
#if defined(__x86_64__)
    if (isa != Isa::kScalar) take_long_avx2(sums, data, nbytes);
    else
#endif
        take_long(sums, data, nbytes);
    (void)isa;
    uint64_t hash = nbytes * kPrime64_1;
    for (int i = 0; i < 4; ++i) {
        hash += folded_product(sums[2 * i] ^ read64(kSecret + 11 + 16 * i),
                               sums[2 * i + 1] ^ read64(kSecret + 11 + 16 * i + 8));
    }
    return avalanche(hash);
}

}  // namespace xxh3

// `isa`: resolved. The value does not depend on it.
inline uint64_t xxh3_64(const void* bytes, int64_t nbytes, Isa isa) {
    const auto* data = static_cast<const unsigned char*>(bytes);
    const auto size = static_cast<size_t>(nbytes);
    if (size <= 16) return xxh3::of_0_to_16(data, size);
    if (size <= 128) return xxh3::of_17_to_128(data, size);
    if (size <= xxh3::kLongest) return xxh3::of_129_to_240(data, size);
    return xxh3::of_long(data, size, isa);
}

}  // namespace lohan
