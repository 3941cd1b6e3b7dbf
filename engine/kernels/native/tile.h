/* The layout of tiles: see `tiles.c`. */
#pragma once

enum { GROUP = 32, TILE = 8 };
