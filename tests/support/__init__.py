"""What tests share: caches that audit themselves, the import floors, the `shared` folder."""
