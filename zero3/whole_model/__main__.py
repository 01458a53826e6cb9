from zero3.whole_model.wrap import main

main()
