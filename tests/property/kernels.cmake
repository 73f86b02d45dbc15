# SPDX-License-Identifier: Apache-2.0
pagoda_test(kernel_properties LABELS property LIBRARIES pagoda_kernels SOURCES
  kernel_bits.cpp
  kernel_casts.cpp
  kernel_environment.cpp
  kernel_norm.cpp
  stochastic_rounding.cpp)
# What is slow runs in the release build only.
if(NOT PAGODA_SANITIZE)
  pagoda_test(kernel_exhaustive LABELS slow TIMEOUT 1200 LIBRARIES pagoda_kernels
    SOURCES kernel_exhaustive.cpp)
endif()
