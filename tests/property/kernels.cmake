# SPDX-License-Identifier: Apache-2.0
pagoda_test(kernel_bits LABELS property SOURCES kernel_bits.cpp LIBRARIES pagoda_kernels)
