// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagoda::kernels {

/// How one element of a parameter, gradient or moment is stored.
enum class Dtype : std::uint8_t { F32, BF16, F16 };

/// The bits of a bfloat16: the upper half of an fp32.
struct Bf16 {
  std::uint16_t bits;
};

/// The bits of an IEEE binary16.
struct Fp16 {
  std::uint16_t bits;
};

constexpr std::size_t element_size(Dtype type) noexcept {
  return type == Dtype::F32 ? 4 : 2;
}

constexpr const char* dtype_name(Dtype type) noexcept {
  return type == Dtype::F32 ? "fp32" : type == Dtype::BF16 ? "bf16" : "fp16";
}

/// The start of an array to read, with its type. A pointer and a tag, copied freely; null is "no
/// such array".
struct ConstElements {
  Dtype type = Dtype::F32;
  const void* data = nullptr;

  constexpr ConstElements() = default;
  constexpr ConstElements(Dtype t, const void* p) : type(t), data(p) {}
  constexpr ConstElements(const float* p) : type(Dtype::F32), data(p) {}
  constexpr ConstElements(const Bf16* p) : type(Dtype::BF16), data(p) {}
  constexpr ConstElements(const Fp16* p) : type(Dtype::F16), data(p) {}

  constexpr explicit operator bool() const noexcept { return data != nullptr; }
  /// The array from element `offset` on; null stays null.
  ConstElements from(std::size_t offset) const noexcept {
    if (data == nullptr) return *this;
    return {type, static_cast<const std::byte*>(data) + offset * element_size(type)};
  }
};

/// The start of an array to write, or to read and write, with its type.
struct Elements {
  Dtype type = Dtype::F32;
  void* data = nullptr;

  constexpr Elements() = default;
  constexpr Elements(Dtype t, void* p) : type(t), data(p) {}
  constexpr Elements(float* p) : type(Dtype::F32), data(p) {}
  constexpr Elements(Bf16* p) : type(Dtype::BF16), data(p) {}
  constexpr Elements(Fp16* p) : type(Dtype::F16), data(p) {}

  constexpr explicit operator bool() const noexcept { return data != nullptr; }
  constexpr operator ConstElements() const noexcept { return {type, data}; }
  /// The array from element `offset` on; null stays null.
  Elements from(std::size_t offset) const noexcept {
    if (data == nullptr) return *this;
    return {type, static_cast<std::byte*>(data) + offset * element_size(type)};
  }
};

}  // namespace pagoda::kernels
