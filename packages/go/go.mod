module oncegate

go 1.21
