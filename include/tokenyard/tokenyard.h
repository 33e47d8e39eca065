// SPDX-License-Identifier: Apache-2.0
// All of Tokenyard's public API, except dlpack.h, which needs DLPack's own header.
#pragma once

#include "tokenyard/backends.h"
#include "tokenyard/communication.h"
#include "tokenyard/dispatch.h"
#include "tokenyard/error.h"
#include "tokenyard/group.h"
#include "tokenyard/manager.h"
#include "tokenyard/params.h"
#include "tokenyard/tensor.h"
#include "tokenyard/version.h"
