# SPDX-License-Identifier: Apache-2.0
# Without the right event the ordering checker fails; with it, nothing does.
pagoda_test(property_ordering LABELS property SOURCES ordering.cpp LIBRARIES pagoda_device)
# What an accelerator does at the same time, the emulated device does too.
pagoda_test(property_overlap LABELS property SOURCES overlap.cpp
  LIBRARIES pagoda_device third_party_json)
# Whatever is allocated and freed in whatever order, blocks never meet.
pagoda_test(property_arena_fuzz LABELS property SOURCES arena_fuzz.cpp LIBRARIES pagoda_device)
