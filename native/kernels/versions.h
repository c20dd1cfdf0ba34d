// Loops for several instruction sets: a function marked ELASWAVE_VERSIONS is compiled once for each, and the best one
// that the machine has is taken when the module is loaded. The bits are the same in all of them, for sums keep their
// order and nothing is contracted: a product is fused with a sum only where std::fma says so.
#pragma once

// Sanitizers are not ready yet when the loader chooses.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ELASWAVE_VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ELASWAVE_VERSIONS
#endif
