# SPDX-License-Identifier: Apache-2.0
pagoda_test(property_prefetch LABELS property LIBRARIES pagoda_prefetch
  SOURCES prefetch_prediction.cpp prefetch_residency.cpp)
