/* What is allocated. Without memory a router cannot go on. */
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void *checked(void *memory) {
    if (memory == NULL) {
        fprintf(stderr, "kvrelay: no memory left for the prefix index\n");
        abort();
    }
    return memory;
}
