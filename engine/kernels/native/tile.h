/* The layout of tiles: see `product.h`. */
#pragma once

enum { GROUP = 32, TILE = 8 };
