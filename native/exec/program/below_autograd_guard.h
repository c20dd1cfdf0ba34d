// Tensor arithmetic as it stands, for the scope of an object: no autograd, no views recorded for it, no autocast,
// whatever the calling thread has switched on. Private to exec/.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace elaswave::exec {

struct BelowAutogradGuard {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::AutoGradMode no_grad{false};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

}  // namespace elaswave::exec
