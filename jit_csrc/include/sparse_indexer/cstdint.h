// SPDX-License-Identifier: Apache-2.0
// int8_t to uint64_t for g++, nvcc and NVRTC, which has no system headers. Same types as libcu++'s
// under NVRTC, so both may be included, in either order.
#pragma once

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef signed short int16_t;
typedef signed int int32_t;
typedef signed long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif
