/* The workers of one role, least busy first; equally busy ones in the order in which they were last
 * chosen, then in that of their tie breaks. The rank of each is that of its last update.
 */
#pragma once

#include "kvrelay_router.h"

typedef struct {
    int64_t busy, chosen_at, tie_break;
    worker *worker;
} ranked;

struct fleet {
    ranked *ranked;
    uint32_t count, room;
};
