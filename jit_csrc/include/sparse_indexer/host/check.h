// SPDX-License-Identifier: Apache-2.0
// What a host entry expects of its tensors, written so that the checks document the shapes:
//
//   Size rows("rows"), width("width");
//   Device device;
//   Match("logits").shape({rows, width}).dtype(float32).on(device).aligned(16).check(logits);
//   Match("lens").shape({rows}).dtype(int32).on(device).check(lens);
//
// The first tensor that names a Size or the Device binds it, later ones must agree. A mismatch is a
// ValueError, `lens: expected [37] int32 on cuda:0, got [36] int32 on cuda:0`. Zero is a legal
// size. Elements are at multiples of their own size.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace sparse_indexer {

using tvm::ffi::TensorView;

constexpr DLDataType uint8{kDLUInt, 8, 1};
constexpr DLDataType int16{kDLInt, 16, 1};
constexpr DLDataType int32{kDLInt, 32, 1};
constexpr DLDataType int64{kDLInt, 64, 1};
constexpr DLDataType float16{kDLFloat, 16, 1};
constexpr DLDataType bfloat16{kDLBfloat, 16, 1};
constexpr DLDataType float32{kDLFloat, 32, 1};

inline bool same(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

// Where a tensor's first element is.
template <typename T>
T* data(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

// Whether every row (all but the last dimension) begins at a multiple of `bytes`: what
// Match::aligned insists on, for kernels that have a slower way, too. The stride of a dimension of
// one is not known: DLPack has a 1 there.
inline bool rows_aligned(const TensorView& tensor, int64_t bytes) {
  if (tensor.numel() == 0) return true;
  bool fits = reinterpret_cast<uintptr_t>(data<void>(tensor)) % bytes == 0;
  for (int i = 0; i < tensor.ndim() - 1; ++i) {
    fits &= tensor.shape()[i] == 1 || tensor.stride(i) * tensor.dtype().bits / 8 % bytes == 0;
  }
  return fits;
}

// A ValueError in the one form that all have.
[[noreturn]] inline void bad_argument(const std::string& argument, const std::string& expected,
                                      const std::string& got) {
  TVM_FFI_THROW(ValueError) << argument << ": expected " << expected << ", got " << got;
  TVM_FFI_UNREACHABLE();
}

// `value` if it is one of low ... high.
inline int64_t expect_int(const char* argument, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    bad_argument(argument, "an int of " + std::to_string(low) + " to " + std::to_string(high),
                 std::to_string(value));
  }
  return value;
}

// A size that several tensors share. Reads as its value once a tensor has bound it.
class Size {
 public:
  explicit Size(const char* name) : name_(name) {}
  Size(const Size&) = delete;
  Size& operator=(const Size&) = delete;
  operator int64_t() const { return value_; }

 private:
  friend class Match;
  const char* name_;
  int64_t value_ = -1;
};

// The CUDA device that all tensors of a call are on. Reads as its number.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  operator int() const { return ordinal_; }

 private:
  friend class Match;
  int ordinal_ = -1;
};

class Match {
 public:
  // One dimension: a shared size, or a number.
  struct Dim {
    Dim(Size& shared) : size(&shared), value(0) {}         // NOLINT: implicit, to be listed
    Dim(int64_t number) : size(nullptr), value(number) {}  // NOLINT
    Dim(int number) : size(nullptr), value(number) {}      // NOLINT
    Size* size;
    int64_t value;
  };

  explicit Match(const char* argument) : argument_(argument) {}

  Match& shape(std::initializer_list<Dim> dims) {
    for (const Dim& dim : dims) {
      if (ndim_ == kMaxDims) TVM_FFI_THROW(RuntimeError) << argument_ << ": too many dimensions";
      dims_[ndim_++] = dim;
    }
    return *this;
  }
  // One of these.
  template <typename... Types>
  Match& dtype(Types... types) {
    static_assert(sizeof...(Types) <= kMaxTypes, "kMaxTypes");
    ((types_[num_types_++] = types), ...);
    return *this;
  }
  Match& on(Device& device) {
    device_ = &device;
    return *this;
  }
  // Neighbors of the last dimension are neighbors in memory.
  Match& last_dim_contiguous() {
    last_contiguous_ = true;
    return *this;
  }
  // No gaps at all.
  Match& contiguous() {
    contiguous_ = true;
    return *this;
  }
  // The first element of every row (all but the last dimension) is at a multiple of this.
  Match& aligned(int64_t bytes) {
    alignment_ = bytes;
    return *this;
  }

  // Compares, and binds what was free. ValueError at the first thing that differs.
  void check(const TensorView& tensor) {
    bool fits = tensor.ndim() == ndim_ && dtype_fits(tensor) && device_fits(tensor);
    for (int i = 0; fits && i < ndim_; ++i) {
      const int64_t have = tensor.shape()[i];
      Size* size = dims_[i].size;
      if (size != nullptr && size->value_ < 0) size->value_ = have;
      fits = have == value(dims_[i]);
    }
    if (!fits) bad_argument(argument_, expected(), describe(tensor));
    if (tensor.data_ptr() == nullptr && tensor.numel() != 0) {
      bad_argument(argument_, "a tensor with memory", "a null pointer");
    }
    if (device_ != nullptr) device_->ordinal_ = tensor.device().device_id;
    check_layout(tensor);
  }

 private:
  static constexpr int kMaxDims = 6;
  static constexpr int kMaxTypes = 4;

  static int64_t value(const Dim& dim) {
    return dim.size != nullptr ? dim.size->value_ : dim.value;
  }

  bool dtype_fits(const TensorView& tensor) const {
    for (int i = 0; i < num_types_; ++i) {
      if (same(types_[i], tensor.dtype())) return true;
    }
    return num_types_ == 0;
  }

  bool device_fits(const TensorView& tensor) const {
    if (device_ == nullptr) return true;
    const DLDevice have = tensor.device();
    return have.device_type == kDLCUDA &&
           (device_->ordinal_ < 0 || device_->ordinal_ == have.device_id);
  }

  void check_layout(const TensorView& tensor) const {
    if (tensor.numel() == 0) return;
    const auto strides = tensor.strides();
    const int64_t alignment = std::max<int64_t>(alignment_, tensor.dtype().bits / 8);
    int64_t dense = 1;
    for (int i = ndim_ - 1; i >= 0; --i) {
      const int64_t size = tensor.shape()[i];
      if (size == 1) continue;
      if (contiguous_ && strides[i] != dense) {
        bad_argument(argument_, "a contiguous tensor", "strides " + list(strides));
      }
      if (last_contiguous_ && i == ndim_ - 1 && strides[i] != 1) {
        bad_argument(argument_, "a contiguous last dimension", "strides " + list(strides));
      }
      dense *= size;
      if (i < ndim_ - 1 && strides[i] * tensor.dtype().bits / 8 % alignment != 0) {
        bad_argument(argument_, "rows at multiples of " + std::to_string(alignment) + " bytes",
                     "strides " + list(strides));
      }
    }
    const auto address = reinterpret_cast<uintptr_t>(data<void>(tensor));
    if (address % static_cast<uintptr_t>(alignment) != 0) {
      bad_argument(argument_, "an address that is a multiple of " + std::to_string(alignment),
                   "one that is " + std::to_string(address % alignment) + " past it");
    }
  }

  std::string expected() const {
    std::string text = "[";
    for (int i = 0; i < ndim_; ++i) {
      const Size* size = dims_[i].size;
      text += i > 0 ? ", " : "";
      text += size != nullptr && size->value_ < 0 ? size->name_ : std::to_string(value(dims_[i]));
    }
    text += "]";
    for (int i = 0; i < num_types_; ++i) {
      text += (i > 0 ? " or " : " ") + std::string(tvm::ffi::DLDataTypeToString(types_[i]));
    }
    if (device_ == nullptr) return text;
    return text +
           (device_->ordinal_ < 0 ? " on cuda" : " on " + place({kDLCUDA, device_->ordinal_}));
  }

  template <typename Sizes>
  static std::string list(const Sizes& sizes) {
    std::string text = "[";
    for (size_t i = 0; i < sizes.size(); ++i)
      text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
    return text + "]";
  }

  static std::string place(DLDevice device) {
    if (device.device_type == kDLCUDA) return "cuda:" + std::to_string(device.device_id);
    if (device.device_type == kDLCPU) return "cpu";
    return "device type " + std::to_string(device.device_type);
  }

  static std::string name(DLDataType type) {
    if (type.code == kDLComplex) return "complex" + std::to_string(type.bits);
    return tvm::ffi::DLDataTypeToString(type);
  }

  static std::string describe(const TensorView& tensor) {
    return list(tensor.shape()) + " " + name(tensor.dtype()) + " on " + place(tensor.device());
  }

  const char* argument_;
  Dim dims_[kMaxDims] = {0, 0, 0, 0, 0, 0};
  int ndim_ = 0;
  DLDataType types_[kMaxTypes]{};
  int num_types_ = 0;
  Device* device_ = nullptr;
  bool last_contiguous_ = false;
  bool contiguous_ = false;
  int64_t alignment_ = 1;
};

}  // namespace sparse_indexer
