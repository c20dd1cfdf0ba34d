// Two rings of bytes in a segment that two processes of one host map, and a unix socket between them. Private to comm/.
//
// The socket carries no data: a byte on it is a doorbell (rung only when the other side's IO thread sleeps), and its
// end is the end of the peer, however it died. The segment is a shared file, gone when both ends are.
#pragma once

#include <memory>

#include "comm/channel.h"

namespace elaswave::comm {

// A new segment for two rings of `ring_bytes` each (rounded up to a power of two). Throws CommError.
Fd make_segment(std::size_t ring_bytes);

// Maps `segment`. The creator writes the first ring and reads the second, the other end the
// reverse. Throws CommError when it is not one of ours.
std::unique_ptr<Channel> make_shm_channel(const Fd& segment, Fd socket, bool creator);

}  // namespace elaswave::comm
